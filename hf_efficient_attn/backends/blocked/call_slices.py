"""Divide a call into slices: one document, one partition of its block layout, heads that are computed together."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_efficient_attn.layout.block_layout import BlockCosts, CompiledPartition, Run
from hf_efficient_attn.layout.call import AttentionCall
from hf_efficient_attn.layout.compile import compile_layout
from hf_efficient_attn.layout.token_mask import NO_MASK, Document, TokenMask


@dataclass(frozen=True)
class CallSlice:
    """Where one part of a call lies in its tensors.

    Attributes:
        example: index in the batch.
        heads, key_heads: query heads and the key heads that they attend to, as slices of equal length.
        queries, keys: rows of the query and key tensors, as slices.
        query_offset: position of the first of these queries in their document.
        masked_key_bias: [keys] of 0 and -inf; None: no key is masked.
    """

    example: int
    heads: slice
    key_heads: slice
    queries: slice
    keys: slice
    query_offset: int
    partition: CompiledPartition
    masked_key_bias: Tensor | None = None

    def take(self, of_queries: Sequence[Tensor], of_keys: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the slice of tensors [batch, heads, tokens, ...] as [heads, tokens, ...], in the partition's order.

        If the order is a range, they are views.
        """
        queries, keys = self.partition.queries, self.partition.keys
        return (
            [in_order(tensor[self.example, self.heads, self.queries], queries) for tensor in of_queries],
            [in_order(tensor[self.example, self.key_heads, self.keys], keys) for tensor in of_keys],
        )

    def put_back(
        self, of_queries: Sequence[Tensor], queries: Sequence[Tensor], of_keys: Sequence[Tensor], keys: Sequence[Tensor]
    ) -> None:
        """Write what `take` returned back into the tensors; views need no writing."""
        for tensor, part in zip(of_queries, queries, strict=True):
            put_back(tensor[self.example, self.heads, self.queries], self.partition.queries, part)
        for tensor, part in zip(of_keys, keys, strict=True):
            put_back(tensor[self.example, self.key_heads, self.keys], self.partition.keys, part)


def call_slices(call: AttentionCall, q: Tensor, k: Tensor, costs: BlockCosts) -> Iterator[CallSlice]:
    """Yield the slices of a call; together they hold every allowed pair once.

    If all examples are alike, they may be folded into the heads: q then has a multiple of the layout's heads.
    """
    layout, tokens, group = call.layout, call.tokens, q.shape[1] // k.shape[1]
    num_folded = q.shape[1] // layout.num_heads
    if tokens is NO_MASK:
        partitions, rows = (
            compile_layout(layout, costs, q.device).partitions,
            (slice(0, layout.num_queries), slice(None)),
        )
        for example in range(q.shape[0]):
            for partition in partitions:
                for heads, key_heads in head_slices(partition.first_head, num_folded * partition.num_heads, group):
                    yield CallSlice(example, heads, key_heads, *rows, layout.query_offset, partition)
        return
    for example, documents in enumerate(tokens.documents(q.shape[0], layout.num_keys, layout.num_positions)):
        for document in documents:
            own = layout.of_document(document)
            if own.num_queries == 0:
                continue
            first_query = document.query_start + own.query_offset - layout.query_offset
            queries = slice(first_query, first_query + own.num_queries)
            keys = slice(document.start, document.stop)
            holes = masked_key_bias(tokens, example, document)
            for partition in compile_layout(own, costs, q.device).partitions:
                for heads, key_heads in head_slices(partition.first_head, num_folded * partition.num_heads, group):
                    yield CallSlice(example, heads, key_heads, queries, keys, own.query_offset, partition, holes)


def blank_rows(call: AttentionCall, costs: BlockCosts, device: torch.device) -> Iterator[tuple[slice, slice]]:
    """Yield the heads and queries that no first run of any example writes, so that they must be filled."""
    if not call.tokens.is_empty:
        # documents may leave out queries
        yield slice(None), slice(None)
        return
    for blank in compile_layout(call.layout, costs, device).blanks:
        # all heads, into which examples may be folded
        is_all = blank.num_heads == call.layout.num_heads
        heads = slice(None) if is_all else slice(blank.first_head, blank.first_head + blank.num_heads)
        yield heads, slice(blank.first_query, blank.first_query + blank.num_queries)


def shares_queries(call: AttentionCall) -> bool:
    """Return whether a query may be in several slices: its document may have keys in several places of another axis."""
    return call.layout.is_cross and not call.tokens.is_empty


def head_slices(first: int, count: int, group: int) -> Iterator[tuple[slice, slice]]:
    """Yield slices of query heads and of the key heads they attend to; `group` query heads share a key head.

    >>> list(head_slices(0, 4, 2))
    [(slice(0, 4, 2), slice(0, 2, None)), (slice(1, 4, 2), slice(0, 2, None))]
    """
    for start in range(first, first + min(count, group)):
        heads = slice(start, first + count, group)
        num_heads = len(range(start, first + count, group))
        yield heads, slice(start // group, start // group + num_heads)


def masked_key_bias(tokens: TokenMask, example: int, document: Document) -> Tensor | None:
    """Return the bias of the masked keys within a document, [keys] of 0 and -inf; None if no key is masked."""
    if not document.has_holes or tokens.key_mask is None:
        return None
    mask = tokens.key_mask[example, document.start : document.stop]
    return torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, float("-inf"))


# The tensors of one run as blocks, and back again: views if a run is regular, copies otherwise.


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
    """Memory for gathered blocks of keys, reused by all chunks of a call: new pages would cost more than the copies."""

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
    has_whole = run.gather_block > 1 and all(has_contiguous_tokens(tensor) for tensor in tensors)
    places = index if has_whole or run.gather_block == 1 else tokens_of(run)
    found = []
    for tensor, memory in zip(tensors, scratch, strict=True):
        heads, _, width = tensor.shape
        taken = memory.of(tensor, heads, run.num_blocks * run.key_tokens, width)
        if has_whole:
            take(gather_blocks(tensor, run).flatten(2), places, taken.view(heads, len(index), run.gather_block * width))
        else:
            take(tensor, places, taken)
        found.append(taken.unflatten(1, (run.num_blocks, run.key_tokens)))
    return found


def has_contiguous_tokens(tensor: Tensor) -> bool:
    """Return whether neighbouring tokens of [heads, tokens, width] are also neighbours in memory."""
    return tensor.stride(2) == 1 and tensor.stride(1) == tensor.shape[2]


def tokens_of(run: Run) -> Tensor:
    """Return the tokens of the gather blocks that a run gathers."""
    assert run.gathered is not None
    inner = torch.arange(run.gather_block, device=run.gathered.device)
    return (run.gathered[..., None] * run.gather_block + inner).flatten()


def take(tensor: Tensor, places: Tensor, taken: Tensor) -> None:
    """Write the tokens at `places` of [heads, tokens, width] to [heads, places, width].

    It does so head by head, because with more dimensions torch would first copy all tokens that are not contiguous.
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


def gather_blocks(tensor: Tensor, run: Run) -> Tensor:
    """Return [heads, tokens, width] as a view [heads, gather blocks, tokens, width] of whole gather blocks."""
    count = tensor.shape[1] // run.gather_block
    return tensor.narrow(1, 0, count * run.gather_block).unflatten(1, (count, run.gather_block))


def add_key_blocks(total: Tensor, blocks: Tensor, run: Run) -> None:
    """Add blocks of keys [heads, blocks, keys, width] to the tokens of `total` that `key_blocks` took them from."""
    heads, _, width = total.shape
    if run.gathered is not None:
        index = run.gathered.flatten()
        gather_blocks(total, run).index_add_(
            1, index, blocks.reshape(heads, len(index), run.gather_block, width).to(total.dtype)
        )
    elif run.key_step == 0:
        total.narrow(1, run.first_key, run.key_tokens).add_(blocks[:, 0] if run.num_blocks == 1 else blocks.sum(1))
    elif run.num_blocks * run.key_step < run.key_tokens:
        # few long operations, because each one waits if a core has other work
        for block in range(run.num_blocks):
            total.narrow(1, run.first_key + block * run.key_step, run.key_tokens).add_(blocks[:, block])
    else:
        # parts that are one step long do not overlap
        for start in range(0, run.key_tokens, run.key_step):
            part = blocks[:, :, start : start + run.key_step]
            shifted_blocks(total, run.first_key + start, part.shape[2], run).add_(part)
