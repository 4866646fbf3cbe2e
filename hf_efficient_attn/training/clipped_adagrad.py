"""The optimizer that adaptive attention spans were found with: Adagrad, each tensor clipped alone, at a constant rate.

Source: Sukhbaatar et al. (arXiv:1905.07799), section 3, and the authors' code.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from hf_efficient_attn.errors import InputError

# the authors' guard against a division by 0, where a norm is compared with the clip
NORM_EPS = 1e-10


class ClippedAdagrad(torch.optim.Optimizer):
    """Adagrad whose step is shortened for every tensor whose own gradient is longer than `clip`.

        sum ← sum + g²;  weight ← weight − lr · min(1, clip / ‖g‖) · g / (√sum + eps)

    with the norm ‖g‖ of one tensor's gradient g. The sum takes the gradient as it is: the clip shortens the step, not
    what later steps are divided by. `max_grad_norm` of Trainer, which clips all gradients as one vector, is another
    method: set it to 0 beside this optimizer. The authors' rate is constant after a warm-up: `constant_after_warmup`.

    Args:
        params: parameters, or groups of them that may have an lr, clip, eps and weight_decay of their own, such as
            those of `optimizer_groups`.
        lr: learning rate.
        clip: length of a tensor's gradient beyond which its step is shortened; None: never, as `torch.optim.Adagrad`.
        eps: added to √sum.
        weight_decay: factor of the weight that is added to the gradient before anything else; 0 in the paper.

    Raises:
        InputError: a number below 0, a clip of 0, or, in `step`, a sparse gradient.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 0.07,
        clip: float | None = 0.03,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "clip": clip, "eps": eps, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for name in ("lr", "eps", "weight_decay"):
            if group[name] < 0:
                raise InputError(f"{name}={group[name]} must not be below 0.")
        if group["clip"] is not None and group["clip"] <= 0:
            raise InputError(f"clip={group['clip']} must be above 0. For no clipping give None.")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move every parameter that has a gradient; return what `closure`, called first, returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, parameter.grad, group)
        return loss

    def _move(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        if gradient.is_sparse:
            raise InputError(
                f"A gradient of shape {list(gradient.shape)} is sparse, which ClippedAdagrad does not take. Build the "
                "embedding with sparse=False."
            )
        if group["weight_decay"]:
            gradient = gradient.add(parameter, alpha=group["weight_decay"])
        state = self.state[parameter]
        if not state:
            state["sum"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        state["sum"].addcmul_(gradient, gradient)
        move = gradient / state["sum"].sqrt().add_(group["eps"])
        if group["clip"] is not None:
            move *= (group["clip"] / (torch.linalg.vector_norm(gradient) + NORM_EPS)).clamp(max=1.0)
        parameter.add_(move, alpha=-group["lr"])


def constant_after_warmup(optimizer: torch.optim.Optimizer, warmup_steps: int) -> LambdaLR:
    """Return the schedule lr · min(1, step / warmup_steps), for steps from 1, as `Trainer(optimizers=…)` takes it.

    transformers' `get_constant_schedule_with_warmup` gives step 1 the rate 0: a lost step, whose gradient Adagrad
    nevertheless adds to its sum. Step 1 of the authors has lr / warmup_steps.

    Raises:
        InputError: warmup_steps is below 0.
    """
    if warmup_steps < 0:
        raise InputError(f"warmup_steps={warmup_steps} must not be below 0.")
    return LambdaLR(optimizer, lambda steps_done: min(1.0, (steps_done + 1) / max(1, warmup_steps)))
