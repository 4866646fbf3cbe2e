"""The keys that a single query reads, as in a step of decoding: found from intervals, without a mask of all keys.

Its tensors are made on the CPU, where token masks can be read without waiting.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_efficient_attn.layout.blocks.run_masks import places_of
from hf_efficient_attn.layout.cache import SMALL_BYTES, BoundedCache
from hf_efficient_attn.layout.dense.additive import additive
from hf_efficient_attn.layout.dense.pairs import is_idle
from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.layout.token_mask import NO_MASK, TokenMask
from hf_efficient_attn.patterns.intervals import Intervals, normalize, union

# so many keys that no query reads are read with a mask, which takes less time than another call of a kernel
MAX_GAP = 64
# more intervals than these are gathered by an index
MAX_SLICES = 8


@dataclass(frozen=True, eq=False)
class ReadKeys:
    """The keys that the query of some example or head reads; most often a few intervals of all keys.

    Attributes:
        intervals: where they are, at least one key; no query reads any other key.
        mask: 0 where a key is read and -inf elsewhere, [batch or 1, heads or 1, 1, keys of the intervals]; None: all of
            them are read by every head of every example.
        keyless: which queries read no key, bool [batch or 1, heads or 1, 1, 1]; None: all read some.
    """

    intervals: Intervals
    mask: Tensor | None = None
    keyless: Tensor | None = None


_read: BoundedCache[ReadKeys] = BoundedCache(SMALL_BYTES)


def read_keys(layout: Layout, tokens: TokenMask, batch_size: int, dtype: torch.dtype) -> ReadKeys:
    """Return what the only query of a layout reads.

    Args:
        dtype: of the mask.
    """
    if is_idle(tokens):
        intervals = common_intervals(layout)
        return ReadKeys(intervals) if intervals else _masked([layout.intervals_of_heads], layout, NO_MASK, dtype)

    def build() -> ReadKeys:
        return _masked(_by_example(layout, tokens, batch_size), layout, tokens, dtype)

    # the layers of one forward pass share the masks of its examples
    return _read.get_of(tokens.tensors, (layout, batch_size, dtype), build)


def common_intervals(layout: Layout) -> Intervals:
    """Return what every head of the only query reads; nothing if heads differ."""
    heads = layout.intervals_of_heads
    return heads[0] if all(intervals == heads[0] for intervals in heads) else ()


def intervals_of_any(layout: Layout) -> Intervals:
    """Return what any head of the only query reads, token masks aside."""
    return common_intervals(layout) or union(*layout.intervals_of_heads)


def gathered(tensor: Tensor, intervals: Intervals) -> Tensor:
    """Return the given keys of a tensor [batch, heads, keys, width]: a view of a single interval, otherwise a copy."""
    if len(intervals) > MAX_SLICES:
        return tensor.index_select(2, places_of([intervals])[0])
    parts = [tensor[:, :, start:stop] for start, stop in intervals]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def _by_example(layout: Layout, tokens: TokenMask, batch_size: int) -> list[Sequence[Intervals]]:
    """Return what each head of the query reads in each example, whose documents may be several with two axes."""
    read: list[Sequence[Intervals]] = []
    for documents in tokens.documents(batch_size, layout.num_keys, layout.num_positions):
        heads: list[Intervals] = [()] * layout.num_heads
        for document in documents:
            own = layout.of_document(document)
            if own.num_queries:
                for head, intervals in enumerate(own.intervals_of_heads):
                    moved = tuple((start + document.start, stop + document.start) for start, stop in intervals)
                    heads[head] = union(heads[head], moved)
        read.append(heads)
    return read


def _masked(read: list[Sequence[Intervals]], layout: Layout, tokens: TokenMask, dtype: torch.dtype) -> ReadKeys:
    """Return the keys that any head of any example reads, masked where not all of them do."""
    if all(intervals == heads[0] for heads in read for intervals in heads):
        read = [heads[:1] for heads in read]
    together = union(*(intervals for heads in read for intervals in heads)) or ((0, 1),)
    together = tuple((start, stop - MAX_GAP) for start, stop in normalize((a, b + MAX_GAP) for a, b in together))
    first, last = together[0][0], together[-1][1]
    allowed = _inside([intervals for heads in read for intervals in heads], first, last)
    allowed = allowed.view(len(read), len(read[0]), 1, last - first)
    allowed = _without_masked(allowed, layout, tokens, first, last)
    if len(together) > 1:
        allowed = gathered(allowed.transpose(2, 3), tuple((start - first, stop - first) for start, stop in together))
        allowed = allowed.transpose(2, 3)
    return ReadKeys(together) if bool(allowed.all()) else ReadKeys(together, *additive(allowed, dtype))


def _inside(rows: Sequence[Intervals], first: int, last: int) -> Tensor:
    """Return which keys from `first` up to `last` lie in the intervals of each row, bool [rows, keys]."""
    width = last - first + 1
    edges = torch.zeros(len(rows) * width, dtype=torch.int32)
    starts, stops = [
        [row * width + interval[side] - first for row, intervals in enumerate(rows) for interval in intervals]
        for side in (0, 1)
    ]
    # intervals do not touch, so that no place is both a start and a stop
    edges[starts], edges[stops] = 1, -1
    return edges.view(len(rows), width).cumsum(1)[:, :-1] > 0


def _without_masked(allowed: Tensor, layout: Layout, tokens: TokenMask, first: int, last: int) -> Tensor:
    """Return the pairs of tokens that are not masked themselves; documents begin and end with such tokens."""
    if tokens.key_mask is not None:
        allowed = allowed & tokens.key_mask[:, None, None, first:last]
    of_queries = tokens.query_mask if layout.is_cross else tokens.key_mask
    return allowed if of_queries is None else allowed & of_queries[:, None, layout.queries, None]
