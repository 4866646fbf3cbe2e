"""Autocast: the dtype that a call of attention is computed in, and the computation kept out of its reach.

Attention is to autocast what torch's `scaled_dot_product_attention` is: queries, keys and values are cast to its dtype
at the door, and nothing within is cast again, so that scores, softmax and lse stay as wide as they are without it.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def autocast_states(*states: Tensor) -> tuple[Tensor, ...]:
    """Return tensors in the dtype of autocast, where it is on for the device of the first; else as they are.

    As in torch, float64 and what is no floating-point number stay as they are.
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
    """Return a context in which nothing on this kind of device is cast."""
    return torch.autocast(device_type, enabled=False) if is_autocast(device_type) else nullcontext()  # type: ignore[return-value]


def is_autocast(device_type: str) -> bool:
    """Return whether autocast is on for a kind of device; of some, "meta" among them, there is none."""
    return bool(_has_autocast(device_type) and torch.is_autocast_enabled(device_type))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_autocast(device_type: str) -> bool:
    # torch before 2.13 cannot trace the question
    return torch.amp.is_autocast_available(device_type)
