"""The loss that layers add to the task's, under `Trainer`: it is logged, and label smoothing is refused."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_efficient_attn.errors import InputError

OWN_LOSS = "A compute_loss_func must add outputs.auxiliary_loss."


class AuxiliaryLossCallback(TrainerCallback):
    """Log `auxiliary_loss`, the loss that layers add to the task's in training, as a part of `loss`.

    This is the loss of indexers (`index`), the commitment of a Routing Transformer's centroids, the penalty of learned
    spans. Each entry of the log has its mean over the forward passes since the last entry, on all processes. For the
    order among callbacks see `SpanCallback`.

    >>> import hf_efficient_attn as hea
    >>> callbacks = [hea.AuxiliaryLossCallback()]  # Trainer(model, args, train_dataset=data, callbacks=callbacks)

    Raises:
        InputError: label smoothing, with which Trainer computes a loss of its own, without this one; after the first
            step, layers that have added nothing.
    """

    def __init__(self) -> None:
        # of the forward passes since the last entry: the sum, and how many there were
        self._seen: Tensor | None = None
        self._has_any = False
        self._hook: Any = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        refuse_label_smoothing(args, "the loss of the layers (auxiliary_loss)")
        self._seen, self._has_any = None, False
        # left by a training that raised
        if self._hook is not None:
            self._hook.remove()
        self._hook = kwargs["model"].register_forward_hook(self._watch)

    def _watch(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        loss = getattr(outputs, "auxiliary_loss", None)
        if loss is not None and module.training:
            one = torch.stack([loss.detach().float(), torch.ones_like(loss, dtype=torch.float32)])
            self._seen = one if self._seen is None else self._seen + one
            self._has_any = True

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if not self._has_any:
            raise InputError(
                f"The layers of {type(kwargs['model']).__name__} have added no loss: they have no indexers, centroids "
                "or learned spans, or these do not train. Leave AuxiliaryLossCallback out."
            )

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._seen is None:
            return
        total, count = summed_up(self._seen).tolist()
        self._seen = None
        entry = {"auxiliary_loss": total / count}
        # Trainer keeps a copy in its history, and hands the original to the callbacks that follow
        kwargs["logs"].update(entry)
        state.log_history[-1].update(entry)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._hook.remove()


def refuse_label_smoothing(args: TrainingArguments, what: str, otherwise: str = "", own_loss: str = OWN_LOSS) -> None:
    """Raise InputError if Trainer smooths labels: it then drops `what`, such as what layers add to the loss.

    otherwise: what else than no label smoothing would do.
    own_loss: a sentence on a loss of the user's own, which the same holds for.
    """
    if args.label_smoothing_factor:
        raise InputError(
            f"label_smoothing_factor={args.label_smoothing_factor}: Trainer then computes the loss itself, without "
            f"{what}. Set label_smoothing_factor=0{otherwise}. {own_loss}"
        )


def summed_up(numbers: Tensor) -> Tensor:
    """Return the sum of numbers over all processes."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(numbers)
    return numbers
