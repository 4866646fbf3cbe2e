"""Which parameters weight decay acts on."""

from typing import Any

from torch import nn

from hf_efficient_attn.errors import InputError


def optimizer_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return two optimizer groups: matrices, decayed by `weight_decay`, and the rest, not decayed.

    The rest is every trainable vector or number: gains, norm scales, biases. Decaying a gain pulls its branch to zero,
    and stock `Trainer` would do it, since it only recognises norms and biases by name. Pass the groups to it by
    `Trainer(..., optimizers=(torch.optim.AdamW(optimizer_groups(model, 0.1), lr=1e-3), None))`.

    Raises:
        InputError: the model has no trainable parameter.

    Source: He & Hofmann (arXiv:2311.01906), appendix D and the authors' code.
    """
    trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not trainable:
        raise InputError(f"{type(model).__name__} has no trainable parameter: every requires_grad is False.")
    decayed = [parameter for name, parameter in trainable if _is_decayed(name, parameter)]
    others = [parameter for name, parameter in trainable if not _is_decayed(name, parameter)]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def _is_decayed(name: str, parameter: nn.Parameter) -> bool:
    return parameter.ndim >= 2 and "gain" not in name.rsplit(".", 1)[-1]
