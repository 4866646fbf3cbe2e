"""Tensors of the host on a device: many by one copy, since the host waits for every copy."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.patterns.pattern import Pattern

# in bytes: where numbers of every dtype may begin
ALIGNMENT = 16


def send(tensors: Sequence[Tensor | None], device: torch.device) -> list[Any]:
    """Return tensors of the CPU on a device, which there share memory where they do here; None stays None.

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
    """Return what was sent of a tensor, whose storage begins at a byte."""
    # of the whole storage, as numbers of the tensor's dtype
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
    # they ask for their tables in the same order again
    return [pattern.with_tables(lambda _: next(sent)) for pattern in patterns]
