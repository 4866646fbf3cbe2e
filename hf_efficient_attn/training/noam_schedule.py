"""The optimizer of the original Transformer: Adam under a rate that rises linearly, then falls as 1/√step.

Source: Vaswani et al. (arXiv:1706.03762), section 5.3.
"""

from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from hf_efficient_attn.errors import InputError


def noam_learning_rate(step: int, hidden_size: int, warmup_steps: int = 4000, factor: float = 1.0) -> float:
    """Return factor · hidden_size^−0.5 · min(step^−0.5, step · warmup_steps^−1.5), for steps from 1.

    >>> [f"{noam_learning_rate(step, hidden_size=512):.1e}" for step in (1, 4000, 16_000)]
    ['1.7e-07', '7.0e-04', '3.5e-04']
    """
    return factor * hidden_size**-0.5 * min(step**-0.5, step * warmup_steps**-1.5)


def noam_optimizer(
    model: nn.Module, hidden_size: int | None = None, warmup_steps: int = 4000, factor: float = 1.0, **adam: Any
) -> tuple[torch.optim.Adam, LambdaLR]:
    """Return the paper's Adam and its schedule, as `Trainer(..., optimizers=noam_optimizer(model))` takes them.

    Args:
        hidden_size: width of the model; None: that of its config.
        warmup_steps: optimizer steps until the rate is highest.
        factor: factor of every rate; 2.0 with 8,000 warm-up steps in tensor2tensor's later settings.
        adam: changes of betas (0.9, 0.98), eps 1e-9 and weight_decay 0.

    Raises:
        InputError: warmup_steps or factor not above 0, a learning rate, or a model without hidden_size.
    """
    if warmup_steps < 1 or factor <= 0:
        raise InputError(f"warmup_steps={warmup_steps} must be at least 1, and factor={factor} above 0.")
    if "lr" in adam:
        raise InputError(f"lr={adam['lr']}: the schedule gives the learning rate. Scale it by factor.")
    width = hidden_size or getattr(getattr(model, "config", None), "hidden_size", None)
    if width is None:
        raise InputError(f"{type(model).__name__} has no config.hidden_size; pass hidden_size.")
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trainable:
        raise InputError(f"{type(model).__name__} has no trainable parameter: every requires_grad is False.")
    optimizer = torch.optim.Adam(trainable, **{"lr": 1.0, "betas": (0.9, 0.98), "eps": 1e-9, **adam})

    def rate(steps_done: int) -> float:
        return noam_learning_rate(steps_done + 1, width, warmup_steps, factor)

    return optimizer, LambdaLR(optimizer, rate)
