"""The tensors of one run as blocks, and back again: views where a run is regular, copies only where it is not."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hf_efficient_attn.layout.blocks.layout import Run


def in_order(tensor: Tensor, order: range | Tensor) -> Tensor:
    """Return the tokens (dimension 1) of [heads, tokens, ...] at the places of `order`; for a range, a view."""
    if isinstance(order, range):
        return tensor[:, order.start : order.stop : order.step]
    return tensor[:, order]


def put_back(tensor: Tensor, order: range | Tensor, part: Tensor) -> None:
    """Write `part`, which `in_order` took from `tensor`, back into it; a view needs no writing."""
    if not isinstance(order, range):
        tensor.index_copy_(1, order, part)


def query_blocks(tensors: Sequence[Tensor], run: Run) -> list[Tensor]:
    """Return tensors [heads, tokens, ...] as the run's blocks of queries, views [heads, blocks, queries, ...]."""
    found, shape = [], (run.num_blocks, run.block_tokens)
    for tensor in tensors:
        rows = tensor.narrow(1, run.first_query, run.num_blocks * run.block_tokens)
        found.append(rows.unflatten(1, shape))
    return found


class Scratch:
    """Memory for gathered blocks of keys, one for all pieces of a call: fresh pages would cost more than the copies."""

    def __init__(self) -> None:
        self.memory: Tensor | None = None

    def of(self, tensor: Tensor, *shape: int) -> Tensor:
        """Return uninitialised memory of a tensor's dtype, valid until the next call."""
        size = math.prod(shape)
        if self.memory is None or self.memory.numel() < size or self.memory.dtype != tensor.dtype:
            self.memory = tensor.new_empty(size)
        return self.memory[:size].view(shape)


def key_blocks(tensors: Sequence[Tensor], run: Run, scratch: Sequence[Scratch]) -> list[Tensor]:
    """Return tensors [heads, tokens, width] as the run's blocks of keys, [heads, blocks, keys, width].

    They are overlapping views, or copies in scratch memory, one for each tensor, if they are gathered.
    """
    if run.gathered is None:
        return [shifted_blocks(tensor, run.first_key, run.key_tokens, run) for tensor in tensors]
    index = run.gathered.flatten()
    has_whole = run.granule > 1 and all(has_contiguous_tokens(tensor) for tensor in tensors)
    places = index if has_whole or run.granule == 1 else tokens_of(run)
    found = []
    for tensor, memory in zip(tensors, scratch, strict=True):
        heads, _, width = tensor.shape
        taken = memory.of(tensor, heads, run.num_blocks * run.key_tokens, width)
        if has_whole:
            take(granules(tensor, run).flatten(2), places, taken.view(heads, len(index), run.granule * width))
        else:
            take(tensor, places, taken)
        found.append(taken.unflatten(1, (run.num_blocks, run.key_tokens)))
    return found


def has_contiguous_tokens(tensor: Tensor) -> bool:
    """Return whether neighbouring tokens of [heads, tokens, width] are neighbours in memory, too."""
    return tensor.stride(2) == 1 and tensor.stride(1) == tensor.shape[2]


def tokens_of(run: Run) -> Tensor:
    """Return the tokens of the granules that a run gathers."""
    assert run.gathered is not None
    inner = torch.arange(run.granule, device=run.gathered.device)
    return (run.gathered[..., None] * run.granule + inner).flatten()


def take(tensor: Tensor, places: Tensor, taken: Tensor) -> None:
    """Write the tokens at `places` of [heads, tokens, width] to [heads, places, width].

    Head by head, since for more dimensions torch would first copy all tokens that are not contiguous.
    """
    for source, target in zip(tensor, taken, strict=True):
        torch.index_select(source, 0, places, out=target)


def shifted_blocks(tensor: Tensor, first: int, tokens: int, run: Run) -> Tensor:
    """Return a view [heads, blocks, tokens, width] whose block b starts `b * run.key_step` tokens after `first`."""
    heads, _, width = tensor.shape
    head_stride, token_stride, stride = tensor.stride()
    return tensor.as_strided(
        (heads, run.num_blocks, tokens, width),
        (head_stride, run.key_step * token_stride, token_stride, stride),
        tensor.storage_offset() + first * token_stride,
    )


def granules(tensor: Tensor, run: Run) -> Tensor:
    """Return [heads, tokens, width] as a view [heads, granules, tokens, width] of whole granules."""
    count = tensor.shape[1] // run.granule
    return tensor.narrow(1, 0, count * run.granule).unflatten(1, (count, run.granule))


def add_key_blocks(total: Tensor, blocks: Tensor, run: Run) -> None:
    """Add blocks of keys [heads, blocks, keys, width] to the tokens of `total` that `key_blocks` took them from."""
    heads, _, width = total.shape
    if run.gathered is not None:
        index = run.gathered.flatten()
        granules(total, run).index_add_(1, index, blocks.reshape(heads, len(index), run.granule, width).to(total.dtype))
    elif run.key_step == 0:
        total.narrow(1, run.first_key, run.key_tokens).add_(blocks[:, 0] if run.num_blocks == 1 else blocks.sum(1))
    else:
        # parts that are one step long do not overlap
        for start in range(0, run.key_tokens, run.key_step):
            part = blocks[:, :, start : start + run.key_step]
            shifted_blocks(total, run.first_key + start, part.shape[2], run).add_(part)
