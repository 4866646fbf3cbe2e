"""The contents of tensors on a device, copied to the host once, since the host waits for the device whenever it reads.

A copy belongs to its tensor until this is changed in place; writes through `.data` on a device go unnoticed. On CPUs
nothing is copied. Code that is being compiled must not use this module, except `derived` and `bring`, which then make
no copies.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.layout.cache import SMALL_BYTES, BoundedCache, may_change_unseen

# tensors on these devices need no copy, or have no contents
UNCOPIED = ("cpu", "meta")
_copies: BoundedCache[Tensor] = BoundedCache(SMALL_BYTES)


def lasting() -> AbstractContextManager[None]:
    """Return a context in which tensors are made whose copies can be kept, unlike those of inference mode."""
    if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
        return nullcontext()
    return torch.inference_mode(False)  # type: ignore[return-value]


def as_lasting(tensor: Tensor | None) -> Tensor | None:
    """Return a tensor, or instead of one of inference mode another whose copies can be kept (see `lasting`)."""
    if tensor is None or torch.compiler.is_compiling() or not tensor.is_inference():
        return tensor
    return tensor.clone()


def on_host(tensor: Tensor) -> Tensor:
    """Return the tensor itself if it is on the host, otherwise its copy there, which nobody may change."""
    if tensor.device.type in UNCOPIED:
        return tensor
    return _copies.get_of((tensor,), None, lambda: tensor.detach().cpu())


def as_they_are(tensor: Tensor | None) -> Tensor | None:
    """Return a copy of a tensor on the CPU, to whose memory others may write; on other devices, the tensor itself.

    Until the tensor changes, all callers share one copy, which nobody may change.
    """
    # tensors of other types, such as fake ones, may have no contents
    if type(tensor) is not Tensor or tensor.device.type != "cpu" or torch.compiler.is_compiling():
        return tensor
    return _copies.get_of((tensor,), None, tensor.detach().clone)


def bring(*given: Any) -> None:
    """Copy tensors to the host for `on_host`, all of a device at once; other arguments, such as None, are ignored."""
    if torch.compiler.is_compiling():
        return
    missing: dict[torch.device, dict[int, Tensor]] = {}
    for each in given:
        if isinstance(each, Tensor) and not may_change_unseen(each) and not _is_known(each):
            missing.setdefault(each.device, {})[id(each)] = each.detach()
    by_identity = {id(each): each for each in given}
    for tensors in missing.values():
        # as bytes, since one copy has one dtype
        flat = torch.cat([each.reshape(-1).contiguous().view(torch.uint8) for each in tensors.values()]).cpu()
        stop = 0
        for identity, each in tensors.items():
            start, stop = stop, stop + each.numel() * each.element_size()
            copy = flat[start:stop].clone().view(each.dtype).view(each.shape)
            _copies.get_of((by_identity[identity],), None, lambda copy=copy: copy)  # type: ignore[misc]


def derived(make: Callable[..., Tensor], *sources: Any) -> Tensor:
    """Return `make(*sources)`; if the contents of all sources are known on the host, so are those of the result.

    make: a function of its arguments only, on their device.
    """
    result = make(*sources)
    if torch.compiler.is_compiling() or result.device.type in UNCOPIED:
        return result
    if all(_is_known(each) for each in sources):
        copies = [on_host(each) if isinstance(each, Tensor) else each for each in sources]
        _copies.get_of((result,), None, lambda: make(*copies))
    return result


def counted_from(first: int, count: int, device: torch.device | str) -> Tensor:
    """Return the numbers from `first` on as a tensor [count], whose contents are known on the host."""
    numbers = torch.arange(count, device=device) + first
    if not torch.compiler.is_compiling() and numbers.device.type not in UNCOPIED:
        _copies.get_of((numbers,), None, lambda: torch.arange(count) + first)
    return numbers


def _is_known(value: Any) -> bool:
    is_here = not isinstance(value, Tensor) or value.device.type in UNCOPIED
    return is_here or _copies.find_of((value,), None) is not None
