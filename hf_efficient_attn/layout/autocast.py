"""Autocast: the dtype in which a call of attention is computed, and how the computation is shielded from autocast.

Under autocast, attention behaves as torch's `scaled_dot_product_attention`: queries, keys and values are cast to its
dtype on entry, and nothing inside is cast again, so that scores, softmax and lse stay as wide as without autocast.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def autocast_states(*states: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors in the dtype of autocast if it is on for the device of the first, otherwise as they are.

    As in torch, tensors in float64 and those that are not floating-point are never cast.
    """
    device = states[0].device.type
    if not is_autocast(device):
        return states
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        each.to(dtype) if each.is_floating_point() and each.dtype != torch.float64 and each.device.type == device
        else each
        for each in states
    )  # fmt: skip


def autocast_off(device_type: str) -> AbstractContextManager[None]:
    """Return a context in which autocast is off for this type of device."""
    return torch.autocast(device_type, enabled=False) if is_autocast(device_type) else nullcontext()  # type: ignore[return-value]


def is_autocast(device_type: str) -> bool:
    """Return whether autocast is on for a type of device; some, such as "meta", have none."""
    return (device_type in ("cpu", "cuda") or _has_autocast(device_type)) and torch.is_autocast_enabled(device_type)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_autocast(device_type: str) -> bool:
    # torch before 2.13 cannot trace this call
    return torch.amp.is_autocast_available(device_type)
