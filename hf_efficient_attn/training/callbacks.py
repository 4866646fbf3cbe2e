"""Callbacks for `Trainer`: losses of layers, steps with full attention, and redrawn random features."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.modeling_utils import unwrap_model

from hf_efficient_attn.errors import InputError
from hf_efficient_attn.integration.layer_patterns import FIELD
from hf_efficient_attn.messages import shown
from hf_efficient_attn.patterns.bands import Full
from hf_efficient_attn.patterns.config_spec import TILE_FIELDS

OWN_LOSS = "A compute_loss_func must add outputs.auxiliary_loss."


class AuxiliaryLossCallback(TrainerCallback):
    """Log `auxiliary_loss`: the loss that layers add to the task's loss in training. `loss` includes it.

    It is the loss of indexers (`index`), the commitment loss of a Routing Transformer's centroids, or the penalty of
    learned spans. Each entry of the log has the mean over the forward passes of all processes since the last entry. For
    the order of callbacks see `SpanCallback`.

    >>> import hf_efficient_attn as hea
    >>> callbacks = [hea.training.AuxiliaryLossCallback()]  # Trainer(model, args, ..., callbacks=callbacks)

    Raises:
        InputError: label smoothing, because Trainer then computes its own loss without this one; after the first step,
            if no layer has added a loss.
    """

    def __init__(self) -> None:
        # the sum of the losses since the last log entry, and the number of forward passes
        self._seen: Tensor | None = None
        self._has_any = False
        self._hook: Any = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        refuse_label_smoothing(args, "the loss of the layers (auxiliary_loss)")
        self._seen, self._has_any = None, False
        # left over from a training that raised
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
                "or learned spans, or these are not trained. Leave AuxiliaryLossCallback out."
            )

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._seen is None:
            return
        total, count = summed_up(self._seen).tolist()
        self._seen = None
        entry = {"auxiliary_loss": total / count}
        # Trainer stores a copy in its history, and passes the original to the following callbacks
        kwargs["logs"].update(entry)
        state.log_history[-1].update(entry)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._hook.remove()


def refuse_label_smoothing(args: TrainingArguments, what: str, otherwise: str = "", own_loss: str = OWN_LOSS) -> None:
    """Raise InputError if Trainer smooths labels, because its loss then leaves out `what`.

    otherwise: an alternative to disabling label smoothing, appended to that advice.
    own_loss: a sentence about a `compute_loss_func`.
    """
    if args.label_smoothing_factor:
        raise InputError(
            f"With label_smoothing_factor={args.label_smoothing_factor}, Trainer computes the loss itself, without "
            f"{what}. Set label_smoothing_factor=0{otherwise}. {own_loss}"
        )


def summed_up(numbers: Tensor) -> Tensor:
    """Return the sum of numbers over all processes."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(numbers)
    return numbers


class LayerLossCallback(TrainerCallback):
    """Set the training progress of a model with `layer_losses` before every step.

    After a fraction a of the training, layer i of n, counted from 1, predicts if i > n · a; the last layer always
    predicts. Resumed training continues with the progress at which it stopped.

    >>> import hf_efficient_attn as hea
    >>> callbacks = [hea.training.LayerLossCallback()]  # Trainer(model, args, train_dataset=data, callbacks=callbacks)

    Raises:
        InputError: at the start of training, a model without `layer_losses`, or label smoothing, because Trainer then
            computes its own loss without those of earlier layers.

    Source: the authors' code of BP-Transformer (Ye et al., arXiv:1911.04070), which counts by epochs.
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        model = kwargs["model"]
        if not getattr(unwrap_model(model).config, "layer_losses", False):
            raise InputError(
                f"{type(unwrap_model(model)).__name__} does not compute losses of layers. Build it with "
                "layer_losses=True, or leave LayerLossCallback out."
            )
        refuse_label_smoothing(args, "the losses of earlier layers (layer_losses)")

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        for module in unwrap_model(kwargs["model"]).modules():
            if hasattr(module, "progress"):
                module.progress = state.global_step / max(1, state.max_steps)


class FullAttentionPhase(TrainerCallback):
    """Use full attention in place of the pattern in the last steps of `Trainer`; causal layers stay causal.

    A model that is trained on 90% of the tokens with selected blocks, and on 10% with full attention, reaches the loss
    of full attention, both with full attention and with blocks (MoBA, Lu et al., arXiv:2502.13189, section 3.2). The
    pattern is restored at the end of every step, so evaluation, checkpoints and the model after training follow the
    pattern. Resumed training continues in the phase of its step.

    last_share: the fraction of steps with full attention, from 0 to 1.

    Raises:
        InputError: `last_share` is not from 0 to 1; at the start of training, a model without a pattern.
    """

    def __init__(self, last_share: float = 0.1) -> None:
        if not isinstance(last_share, float | int) or not 0 <= last_share <= 1:
            raise InputError(f"last_share={shown(last_share)} must be a fraction of the steps, from 0 to 1.")
        self.last_share = last_share
        # (config with a pattern, its spec, the spec with full attention)
        self._specs: list[tuple[Any, Any, Any]] = []

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        model: Any = unwrap_model(kwargs["model"])
        configs = {id(each.config): each.config for each in model.modules() if hasattr(each, "config")}
        found = [(config, getattr(config, FIELD, None)) for config in configs.values()]
        self._specs = [(config, spec, reading_everything(spec)) for config, spec in found if spec is not None]
        if not self._specs:
            raise InputError(
                f"{type(model).__name__} has no attention_pattern, so it has full attention in all steps. Call "
                "sparsify(model, pattern) before training, or leave FullAttentionPhase out."
            )

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step >= round((1 - self.last_share) * state.max_steps):
            for config, _, full in self._specs:
                setattr(config, FIELD, full)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        for config, spec, _ in self._specs:
            setattr(config, FIELD, spec)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.on_step_end(args, state, control)


def reading_everything(spec: Any) -> Any:
    """Return an `attention_pattern` of any form, in JSON types, with each pattern replaced by `Full()`.

    >>> reading_everything([None, {"kind": "block_top_k", "block_tokens": 64, "num_chosen": 3}])
    [None, {'kind': 'full'}]
    """
    if spec is None:
        return None
    if isinstance(spec, list):
        return [reading_everything(entry) for entry in spec]
    if "kind" in spec:
        return Full().to_dict()
    if set(spec) >= TILE_FIELDS:
        return {**spec, "patterns": reading_everything(spec["patterns"])}
    return {name: reading_everything(entry) for name, entry in spec.items()}


class RedrawFeaturesCallback(TrainerCallback):
    """Redraw the random features of Performers every `feature_redraw_steps` (a config field) steps of `Trainer`.

    New draws prevent a model from adapting to the errors of one draw, which would make the estimate biased. A draw
    depends only on the config's `feature_seed` and the step, so all processes and resumed training have the same
    features. The last draw is saved with the model.

    Raises:
        InputError: at the start of training, a model without `feature_redraw_steps` in its config, or an adapter of
            PEFT, because an adapter is saved without the features of its base model.

    Source: Choromanski et al., "Rethinking Attention with Performers" (arXiv:2009.14794).
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        model: Any = unwrap_model(kwargs["model"])
        if getattr(model.config, "feature_redraw_steps", None) is None:
            raise InputError(
                f"{type(model).__name__} has no feature_redraw_steps, so no features are redrawn. Set it in the "
                "config, or leave RedrawFeaturesCallback out."
            )

        if hasattr(model, "peft_config"):
            raise InputError(
                "RedrawFeaturesCallback changes the features of the base model, but an adapter is saved without "
                "them. Leave the callback out, or train the model itself."
            )

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        model: Any = unwrap_model(kwargs["model"])
        number, rest = divmod(state.global_step, model.config.feature_redraw_steps)
        # the first steps use the features that the model has, possibly from an earlier training
        if number and rest == 0:
            model.redraw_features(number)
