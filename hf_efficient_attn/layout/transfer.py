"""Copies between host and device: each is made once, and many together, since the host waits for every copy.

A copy is valid until its tensor is changed in place; writes through `.data` on a device go unnoticed. On CPUs nothing
is copied. Code that is being compiled must not use this module, except `derived` and `prefetch_to_host`, which then
make no copies.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.layout.cache import SMALL_BYTES, BoundedCache, cached, may_change_unseen
from hf_efficient_attn.patterns.pattern import Pattern

# tensors on these devices need no copy, or have no contents
UNCOPIED = ("cpu", "meta")
_copies: BoundedCache[Tensor] = BoundedCache(SMALL_BYTES)


def outside_inference_mode() -> AbstractContextManager[None]:
    """Return a context for making tensors whose copies can be kept, unlike those of tensors made in inference mode."""
    if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
        return nullcontext()
    return torch.inference_mode(False)  # type: ignore[return-value]


def as_normal_tensor(tensor: Tensor | None) -> Tensor | None:
    """Return the tensor, or a normal copy if it was made in inference mode (see `outside_inference_mode`)."""
    if tensor is None or torch.compiler.is_compiling() or not tensor.is_inference():
        return tensor
    return tensor.clone()


def on_host(tensor: Tensor) -> Tensor:
    """Return the tensor itself if it is on the host, otherwise its shared copy there, which must not be changed."""
    if tensor.device.type in UNCOPIED:
        return tensor
    return _copies.get_of((tensor,), None, lambda: tensor.detach().cpu())


def snapshot(tensor: Tensor | None) -> Tensor | None:
    """Return a copy of a tensor on the CPU, whose memory others may write to; on other devices, the tensor itself.

    Until the tensor changes, all callers share one copy, which must not be changed.
    """
    # tensors of other types, such as fake ones, may have no contents
    if type(tensor) is not Tensor or tensor.device.type != "cpu" or torch.compiler.is_compiling():
        return tensor
    return _copies.get_of((tensor,), None, tensor.detach().clone)


def prefetch_to_host(*given: Any) -> None:
    """Copy tensors to the host for `on_host`, all of one device at once; arguments that are not tensors are ignored."""
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


# Tensors of the host on a device: many in one copy, since the host waits for every copy.


# in bytes; numbers of every dtype may start at its multiples
ALIGNMENT = 16


def send(tensors: Sequence[Tensor | None], device: torch.device) -> list[Any]:
    """Return copies of CPU tensors on a device, which share memory there if they do here; None stays None.

    >>> send([torch.tensor([1, 2]), torch.tensor([True])], torch.device("meta"))
    [tensor(..., device='meta', size=(2,), dtype=torch.int64), tensor(..., device='meta', size=(1,), dtype=torch.bool)]
    """
    if device.type == "cpu":
        return list(tensors)
    if torch.compiler.is_compiling():
        return [None if each is None else each.to(device) for each in tensors]
    parts: list[Tensor] = []
    starts: dict[int, int] = {}
    num_bytes = 0
    for storage in (each.untyped_storage() for each in tensors if each is not None):
        if storage.data_ptr() not in starts:
            starts[storage.data_ptr()] = num_bytes
            rest = -storage.nbytes() % ALIGNMENT
            parts += [torch.empty(0, dtype=torch.uint8).set_(storage), torch.empty(rest, dtype=torch.uint8)]
            num_bytes += storage.nbytes() + rest
    sent = torch.cat(parts).to(device) if parts else torch.empty(0, dtype=torch.uint8)
    return [None if each is None else _at(sent, starts[each.untyped_storage().data_ptr()], each) for each in tensors]


def _at(sent: Tensor, start: int, like: Tensor) -> Tensor:
    """Return the copy of a tensor, whose storage starts at byte `start` of `sent`."""
    # all that was sent, as numbers of the tensor's dtype
    own = sent.view(like.dtype)
    return own.as_strided(like.shape, like.stride(), start // like.element_size() + like.storage_offset())


def tables_on(patterns: Sequence[Pattern], device: torch.device) -> list[Pattern]:
    """Return patterns with their lookup tables as tensors on a device."""
    tables: list[Tensor] = []

    def keep(table: tuple[int, ...]) -> Tensor:
        tables.append(torch.tensor(table, device="cpu"))
        return tables[-1]

    kept = [pattern.with_tables(keep) for pattern in patterns]
    if device.type == "cpu":
        return kept
    sent = iter(send(tables, device))
    # `with_tables` visits the tables in the same order again
    return [pattern.with_tables(lambda _: next(sent)) for pattern in patterns]


# Numbers of the host as tensors on a device, copied once, since the host waits for every copy.


def device_numbers(numbers: tuple[float, ...], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return the numbers as a tensor [numbers], which is shared and must not be changed.

    dtype: None means the default of `torch.tensor`.
    """
    if device.type == "cpu" or torch.compiler.is_compiling():
        return torch.tensor(numbers, dtype=dtype, device=device)
    return _kept(numbers, device, dtype)


@cached()
def _kept(numbers: tuple[float, ...], device: torch.device, dtype: torch.dtype | None) -> Tensor:
    return torch.tensor(numbers, dtype=dtype, device=device)
