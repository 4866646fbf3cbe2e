"""Stop training at the first loss that is not a number, before it reaches the weights."""

from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import logging

logger = logging.get_logger(__name__)


class StopOnNonFiniteLoss(TrainerCallback):
    """Stop `Trainer` when a loss is NaN or infinite; the weights stay those of the last good step.

    Blocks without norms have unbounded activations and can overflow, above all in fp16 (He & Hofmann,
    arXiv:2311.01906, section 5). Trainer itself hides the event (`logging_nan_inf_filter`) and goes on. This callback
    watches the loss of every forward (no host synchronisation before the optimizer step), drops the gradients of a bad
    step, so that nothing is updated, saves nothing more and says why. Gradient overflow that fp16 loss scaling handles
    by itself is left alone: only the loss counts.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self._is_bad: torch.Tensor | None = None
        self._hook: Any = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.reason, self._is_bad = None, None
        self._hook = kwargs["model"].register_forward_hook(self._watch)

    def _watch(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        loss = outputs.get("loss") if hasattr(outputs, "get") else None
        if loss is not None and module.training:
            is_bad = ~torch.isfinite(loss.detach()).all()
            self._is_bad = is_bad if self._is_bad is None else self._is_bad | is_bad

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        is_bad, self._is_bad = self._is_bad, None
        if is_bad is None or not self._any_rank(is_bad):
            return
        for parameter in kwargs["model"].parameters():
            parameter.grad = None
        checkpoint = get_last_checkpoint(args.output_dir) if args.output_dir else None
        self.reason = (
            f"The loss is not finite at step {state.global_step + 1}. Nothing was updated: the model holds the "
            f"weights of step {state.global_step}, and the last checkpoint is {checkpoint or 'none'}. "
            "Activations overflowed; use bf16 or fp32 instead of fp16, a lower learning rate, or a block with norms."
        )
        logger.error(self.reason)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        if self.reason is not None:
            control.should_training_stop = True
            control.should_save = control.should_evaluate = False
        return control

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._hook.remove()

    @staticmethod
    def _any_rank(is_bad: torch.Tensor) -> bool:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            flag = is_bad.to(torch.int32)
            torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
            return bool(flag)
        return bool(is_bad)
