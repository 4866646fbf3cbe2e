"""Stop training at the first loss or gradient that is not a number, before it reaches the weights."""

from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils import logging

from hf_efficient_attn.training.complete_checkpoints import last_complete_checkpoint

logger = logging.get_logger(__name__)


class StopOnNonFiniteLoss(TrainerCallback):
    """Stop `Trainer` when a loss or a gradient is NaN or infinite; the weights stay those of the last good step.

    Blocks without norms have unbounded activations and can overflow, above all in fp16 (He & Hofmann,
    arXiv:2311.01906, section 5). Trainer itself hides the event (`logging_nan_inf_filter`) and goes on. This callback
    looks at the loss of every forward and at the gradients before every optimizer step (one host synchronisation),
    drops a bad step on all processes, saves nothing more and says why in `reason`. Gradients that overflow under fp16
    loss scaling are left to the scaler, which skips the step by itself.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self._is_bad: torch.Tensor | None = None
        self._hook: Any = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.reason, self._is_bad = None, None
        if self._hook is not None:  # left by a training that raised
            self._hook.remove()
        self._hook = kwargs["model"].register_forward_hook(self._watch)

    def _watch(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        loss = outputs.get("loss") if hasattr(outputs, "get") else None
        if loss is not None and module.training:
            is_bad = ~torch.isfinite(loss.detach()).all()
            self._is_bad = is_bad if self._is_bad is None else self._is_bad | is_bad

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        model, scaler = kwargs["model"], getattr(kwargs.get("optimizer"), "scaler", None)
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        is_bad, self._is_bad = self._is_bad, None
        if scaler is None and gradients:
            has_overflowed = ~torch.isfinite(_largest(gradients))
            is_bad = has_overflowed if is_bad is None else is_bad | has_overflowed
        if is_bad is None or not _any_process(is_bad):
            return
        for parameter in model.parameters():
            if scaler is not None and not args.max_grad_norm and parameter.grad is not None:
                parameter.grad.fill_(torch.nan)  # the scaler has not looked yet and must find a reason to skip the step
            else:
                parameter.grad = None
        checkpoint = last_complete_checkpoint(args.output_dir) if args.output_dir else None
        self.reason = (
            f"The loss or a gradient is not finite at step {state.global_step + 1}. Nothing was updated: training ends "
            f"with the weights of step {state.global_step}, and the last complete checkpoint is "
            f"{checkpoint or 'none'}. As a rule activations have overflowed: use bf16 or fp32 instead of fp16, a lower "
            "learning rate, or a block with norms."
        )
        logger.error(self.reason)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        if self.reason is not None:
            control.should_training_stop = True
            control.should_save = control.should_evaluate = False
        return control

    on_epoch_end = on_step_end

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._hook.remove()


def _largest(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Return the largest magnitude; unlike the 2-norm it cannot itself overflow. Works on sharded gradients."""
    norm = torch.nn.utils.get_total_norm(gradients, norm_type=float("inf"))
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def _any_process(is_bad: torch.Tensor) -> bool:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        flag = is_bad.to(torch.int32)
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
        return bool(flag)
    return bool(is_bad)
