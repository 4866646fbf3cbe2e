"""What stands in tensors of a device, copied to the host once: the host waits for the device whenever it reads of it.

A copy belongs to its tensor; one that was changed in place is another, but for writes by `.data`, of which a device
tells nobody. On CPUs nothing is copied. Nothing here is for code that is being compiled, but for `derived` and `bring`,
which then do only what shows.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.layout.cache import SMALL_BYTES, BoundedCache

# what stands in tensors of these devices needs no copy, or cannot be copied
UNCOPIED = ("cpu", "meta")
_copies: BoundedCache[Tensor] = BoundedCache(SMALL_BYTES)


def lasting() -> AbstractContextManager[None]:
    """Return a block that makes tensors of which copies can be kept, which tensors of inference mode are not."""
    if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
        return nullcontext()
    return torch.inference_mode(False)  # type: ignore[return-value]


def as_lasting(tensor: Tensor | None) -> Tensor | None:
    """Return a tensor, or in the place of one of inference mode another of which copies can be kept (see `lasting`)."""
    if tensor is None or torch.compiler.is_compiling() or not tensor.is_inference():
        return tensor
    return tensor.clone()


def on_host(tensor: Tensor) -> Tensor:
    """Return a tensor's copy on the host: the tensor itself if it is there, else a copy that nobody may change."""
    if tensor.device.type in UNCOPIED:
        return tensor
    return _copies.get_of((tensor,), None, lambda: tensor.detach().cpu())


def as_they_are(tensor: Tensor | None) -> Tensor | None:
    """Return a copy that keeps what now stands in a tensor of the CPU, whose memory others may write; else the tensor.

    All who ask before it changes share one copy, which nobody may change.
    """
    # what stands in tensors of other types may not be known, as in fake ones
    if type(tensor) is not Tensor or tensor.device.type != "cpu" or torch.compiler.is_compiling():
        return tensor
    return _copies.get_of((tensor,), None, tensor.detach().clone)


def bring(*given: Any) -> None:
    """Copy tensors to the host for `on_host`, all of a device at once. Other arguments, such as None, are left out."""
    if torch.compiler.is_compiling():
        return
    missing: dict[torch.device, dict[int, Tensor]] = {}
    for each in given:
        if isinstance(each, Tensor) and not each.is_inference() and not _is_known(each):
            missing.setdefault(each.device, {})[id(each)] = each.detach()
    by_identity = {id(each): each for each in given}
    for tensors in missing.values():
        # bytes, since a copy has one dtype
        flat = torch.cat([each.reshape(-1).contiguous().view(torch.uint8) for each in tensors.values()]).cpu()
        stop = 0
        for identity, each in tensors.items():
            start, stop = stop, stop + each.numel() * each.element_size()
            copy = flat[start:stop].clone().view(each.dtype).view(each.shape)
            _copies.get_of((by_identity[identity],), None, lambda copy=copy: copy)  # type: ignore[misc]


def derived(make: Callable[..., Tensor], *sources: Any) -> Tensor:
    """Return `make(*sources)`; where what stands in all sources is known, what stands in the result is, too.

    make: of nothing but its arguments, on their device.
    """
    result = make(*sources)
    if torch.compiler.is_compiling() or result.device.type in UNCOPIED:
        return result
    if all(_is_known(each) for each in sources):
        copies = [on_host(each) if isinstance(each, Tensor) else each for each in sources]
        _copies.get_of((result,), None, lambda: make(*copies))
    return result


def counted_from(first: int, count: int, device: torch.device | str) -> Tensor:
    """Return the numbers from `first` on as a tensor [count], known on the host."""
    numbers = torch.arange(count, device=device) + first
    if not torch.compiler.is_compiling() and numbers.device.type not in UNCOPIED:
        _copies.get_of((numbers,), None, lambda: torch.arange(count) + first)
    return numbers


def _is_known(value: Any) -> bool:
    is_here = not isinstance(value, Tensor) or value.device.type in UNCOPIED
    return is_here or _copies.find_of((value,), None) is not None
