"""The keys that a single query attends to, as in a decoding step, found from intervals without a mask of all keys.

The tensors are made on the CPU, where token masks can be read without waiting for a device.
"""

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from hf_efficient_attn.errors import WorkLimitError
from hf_efficient_attn.layout.block_rows import CPU, places_of
from hf_efficient_attn.layout.cache import SMALL_BYTES, BoundedCache, cached
from hf_efficient_attn.layout.dense_mask import additive, is_idle
from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.layout.token_mask import NO_MASK, TokenMask
from hf_efficient_attn.patterns.intervals import (
    SMALL_SHARE,
    CrossingError,
    Intervals,
    Moving,
    normalize,
    size,
    union,
    work_budget,
)
from hf_efficient_attn.patterns.pattern import Pattern

# gaps between intervals of up to this many keys, in all heads, are read and masked: faster than another kernel call
MAX_GAP_READS = 1 << 12
# if there are more intervals than this, they are gathered with an index
MAX_SLICES = 8
# the approximate size of an interval in Python
INTERVAL_BYTES = 128
# a copy of a key takes about as long as reading this many keys in place
READS_PER_COPY = 4
# if no head attends to more than this fraction of the keys of all heads together, each head is given only its own keys
OWN_PART = 0.5


@dataclass(frozen=True, eq=False)
class ReadKeys:
    """The keys that queries attend to; for a single query, these are usually a few intervals.

    Attributes:
        intervals: intervals of at least one key that hold all keys of all queries; empty for all keys.
        mask: 0 where a query attends to a key and -inf elsewhere, [batch or 1, heads or 1, queries, keys of the
            intervals]; None if every head of every example attends to all of these keys.
        keyless: which queries have no keys, bool [batch or 1, heads or 1, queries, 1]; None if all have some.
        places: the keys of each head, instead of intervals, int64 [batch or 1, heads or 1, keys].
    """

    intervals: Intervals
    mask: Tensor | None = None
    keyless: Tensor | None = None
    places: Tensor | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """Return these keys of a tensor [batch, key heads, keys, width]."""
        if self.places is not None:
            return _taken(tensor, self.places)
        return gathered(tensor, self.intervals) if self.intervals else tensor


_read: BoundedCache[ReadKeys] = BoundedCache(SMALL_BYTES)


def read_keys(layout: Layout, tokens: TokenMask, batch_size: int, dtype: torch.dtype) -> ReadKeys:
    """Return the keys that the only query of a layout attends to.

    Args:
        dtype: the dtype of the mask.
    """
    if is_idle(tokens):
        return keys_of_query(layout).unmasked or _masked_of_layout(layout, dtype)

    def build() -> ReadKeys:
        return _masked(_by_example(layout, tokens, batch_size), layout, tokens, dtype)

    # the layers of one forward pass share the masks of its examples
    return _read.get_of(tokens.tensors, (layout, batch_size, dtype), build)


@dataclass(frozen=True, eq=False)
class KeysOfQuery:
    """The keys that the heads of a single query attend to, without token masks.

    Attributes:
        heads: the keys of each head.
        common: the keys of every head if all heads have the same; otherwise empty.
        num_computed: the number of keys for which each head computes scores.
        unmasked: the same keys without a mask; None if heads differ, or if a mask is faster than several intervals.
    """

    heads: tuple[Intervals, ...]
    common: Intervals
    num_computed: int
    unmasked: ReadKeys | None

    @property
    def num_held_bytes(self) -> int:
        """The approximate size in memory; every decoding step has such a value, and measuring it would take long."""
        return INTERVAL_BYTES * (len(self.common) or sum(map(len, self.heads)))


@cached()
def keys_of_query(layout: Layout) -> KeysOfQuery:
    """Return the keys that the only query of a layout attends to, without token masks."""
    heads = layout.intervals_of_heads()
    if any(intervals != heads[0] for intervals in heads):
        most, together = max(map(size, heads)), size(union(*heads))
        return KeysOfQuery(heads, (), most if _have_own(most, together) else together, None)
    common = heads[0]
    needs_mask = len(common) == 0 or common != _without_gaps(common, layout)
    return KeysOfQuery(heads, common, size(common), None if needs_mask else ReadKeys(common))


@cached()
def _masked_of_layout(layout: Layout, dtype: torch.dtype) -> ReadKeys:
    return _masked([keys_of_query(layout).heads], layout, NO_MASK, dtype)


def _without_gaps(intervals: Intervals, layout: Layout) -> Intervals:
    """Return the intervals with small gaps between them filled, unless it is faster to copy the keys."""
    gap = MAX_GAP_READS // layout.num_heads
    filled = tuple((start, stop - gap) for start, stop in normalize((start, stop + gap) for start, stop in intervals))
    is_copied = len(intervals) > MAX_SLICES and READS_PER_COPY * size(intervals) < size(filled)
    return intervals if is_copied else filled


def gathered(tensor: Tensor, intervals: Intervals) -> Tensor:
    """Return the given keys of a tensor [batch, heads, keys, width]: a view for a single interval, otherwise a copy."""
    if len(intervals) == 1:
        start, stop = intervals[0]
        return tensor if stop - start == tensor.shape[2] else tensor.narrow(2, start, stop - start)
    if len(intervals) > MAX_SLICES:
        return tensor.index_select(2, places_of([intervals])[0])
    return torch.cat([tensor[:, :, start:stop] for start, stop in intervals], 2)


def _taken(tensor: Tensor, places: Tensor) -> Tensor:
    """Return the keys at the places of each head, [batch, heads, places, width]; all heads may share their places."""
    num_examples, num_key_heads = tensor.shape[:2]
    examples = torch.arange(num_examples, device=tensor.device)[:, None, None]
    # consecutive heads share a key head
    num_sharing = max(1, places.shape[1] // num_key_heads)
    key_heads = torch.arange(num_key_heads * num_sharing, device=tensor.device) // num_sharing
    return tensor[examples, key_heads[:, None], places]


def _have_own(most: int, together: int) -> bool:
    """Return whether each head is given only its own keys: `most` keys of one head against `together` of all heads."""
    return 0 < most <= OWN_PART * together


def _by_example(layout: Layout, tokens: TokenMask, batch_size: int) -> list[Sequence[Intervals]]:
    """Return the keys of each head of the query in each example; across two axes, they may lie in several documents."""
    read: list[Sequence[Intervals]] = []
    for documents in tokens.documents(batch_size, layout.num_keys, layout.num_positions):
        heads: list[Intervals] = [()] * layout.num_heads
        for document in documents:
            own = layout.of_document(document)
            if own.num_queries:
                for head, intervals in enumerate(own.intervals_of_heads()):
                    moved = tuple((start + document.start, stop + document.start) for start, stop in intervals)
                    heads[head] = union(heads[head], moved)
        read.append(heads)
    return read


def _masked(read: list[Sequence[Intervals]], layout: Layout, tokens: TokenMask, dtype: torch.dtype) -> ReadKeys:
    """Return the keys that any head of any example attends to, with a mask unless all of them attend to all."""
    if all(intervals == heads[0] for heads in read for intervals in heads):
        read = [heads[:1] for heads in read]
    rows = [intervals for heads in read for intervals in heads]
    together = union(*rows) or ((0, 1),)
    if _have_own(max(map(size, rows)), size(together)):
        return _own(rows, len(read), layout, tokens, dtype)
    together = _without_gaps(together, layout)
    allowed = _inside(rows, together).view(len(read), len(read[0]), 1, -1)
    key_mask = tokens.key_mask
    is_token = None if key_mask is None else gathered(key_mask[:, None, :, None], together).transpose(2, 3)
    allowed = _without_masked(allowed, layout, tokens, is_token)
    return ReadKeys(together) if bool(allowed.all()) else ReadKeys(together, *additive(allowed, dtype))


def _own(
    rows: Sequence[Intervals], num_examples: int, layout: Layout, tokens: TokenMask, dtype: torch.dtype
) -> ReadKeys:
    """Return the keys of each row separately, padded to equal length and masked.

    rows: the keys of each head of the first example, then of the next examples.
    """
    counts = torch.tensor(list(map(size, rows)), device=CPU)
    is_read = torch.arange(int(counts.max()), device=CPU) < counts[:, None]
    places = torch.zeros(is_read.shape, dtype=torch.int64, device=CPU)
    places[is_read] = places_of([tuple(interval for intervals in rows for interval in intervals)])[0]
    places = places.view(num_examples, -1, places.shape[1])
    allowed = is_read.view(*places.shape[:2], 1, -1)
    key_mask = tokens.key_mask
    if key_mask is not None:
        # masks differ between examples even if places do not
        places = places.expand(len(key_mask), -1, -1)
    is_token = None if key_mask is None else _taken(key_mask[:, None, :, None], places).transpose(2, 3)
    allowed = _without_masked(allowed, layout, tokens, is_token)
    mask, keyless = (None, None) if bool(allowed.all()) else additive(allowed, dtype)
    return ReadKeys((), mask, keyless, places)


def _inside(rows: Sequence[Intervals], together: Intervals) -> Tensor:
    """Return which keys of `together`, which covers the keys of all rows, each row attends to, bool [rows, keys]."""
    # only over the keys of `together`: the cost of all keys would grow with the length of the text
    offsets = list(accumulate((stop - start for start, stop in together), initial=0))
    width, starts = offsets[-1] + 1, [start for start, _ in together]
    edges = torch.zeros(len(rows) * width, dtype=torch.int32, device=CPU)
    places: list[list[int]] = [[], []]
    for row, intervals in enumerate(rows):
        shifts = [offsets[part] - starts[part] for part in (bisect(starts, start) - 1 for start, _ in intervals)]
        # without the keys between them, intervals may touch; they are joined, so that no place is both start and stop
        moved = normalize((start + by, stop + by) for (start, stop), by in zip(intervals, shifts, strict=True))
        for side in (0, 1):
            places[side] += [row * width + interval[side] for interval in moved]
    edges[places[0]], edges[places[1]] = 1, -1
    return edges.view(len(rows), width).cumsum(1)[:, :-1] > 0


def _without_masked(allowed: Tensor, layout: Layout, tokens: TokenMask, is_token: Tensor | None) -> Tensor:
    """Return the allowed pairs without those of masked tokens, which may lie inside documents.

    is_token: which keys are not masked, [batch, heads or 1, 1, keys]; None if no key is masked.
    """
    if is_token is not None:
        allowed = allowed & is_token
    of_queries = tokens.query_mask if layout.is_cross else tokens.key_mask
    return allowed if of_queries is None else allowed & of_queries[:, None, layout.queries, None]


# Layouts that need no mask, because all queries attend to the same keys or to a causal triangle of them.


def maskless(layout: Layout) -> tuple[int, int, bool] | None:
    """Return (start, stop, is_causal) if no mask is needed over the keys start … stop - 1; None if one is.

    Either every query of every head attends to all of these keys, or query i attends to them up to the i-th.
    """
    if not torch.compiler.is_compiling():
        return _of_single(layout) if layout.num_queries == 1 else _of_intervals(layout)
    # a compiler cannot trace the intervals of patterns
    return _of_limits(layout)


def _of_limits(layout: Layout) -> tuple[int, int, bool] | None:
    """Return the result of `maskless` from the limits of a band without a limit on the left."""
    limits = layout.pattern.band_limits
    if limits == (None, None):
        return 0, layout.num_keys, False
    return (0, layout.num_queries, True) if limits == (None, 0) and layout.query_offset == 0 else None


def _of_single(layout: Layout) -> tuple[int, int, bool] | None:
    intervals = keys_of_query(layout).common
    return (*intervals[0], False) if len(intervals) == 1 else None


@cached()
def _of_intervals(layout: Layout) -> tuple[int, int, bool] | None:
    groups = layout.head_groups()
    if len(groups) > 1:
        return None
    pattern, num_keys = groups[0][2], layout.num_keys
    first, last = layout.query_offset, layout.query_offset + layout.num_queries - 1
    read_by_any = pattern.key_intervals(first, last, num_keys)
    if len(read_by_any) == 1 and read_by_any == pattern.full_key_intervals(first, last, num_keys):
        return *read_by_any[0], False
    return (0, layout.num_queries, True) if first == 0 and reads_triangle(pattern, last, num_keys) else None


def reads_triangle(pattern: Pattern, last: int, num_keys: int) -> bool:
    """Return whether each query q of 0..last attends to exactly the keys 0..q; False if that takes long to decide."""
    if pattern.band_limits == (None, 0):
        return True
    try:
        with work_budget("Looking for a causal triangle", share=SMALL_SHARE):
            return _rows_form_triangle(pattern, last, num_keys)
    except WorkLimitError:
        return False


def _rows_form_triangle(pattern: Pattern, last: int, num_keys: int) -> bool:
    # for most other patterns, the last row alone shows that they are not a triangle
    extents = [(0, last), (last, last)]
    while extents:
        first, last = extents.pop()
        try:
            intervals = pattern.moving_intervals(first, last, num_keys)
        except CrossingError:
            middle = (first + last) // 2
            extents += [(first, middle), (middle + 1, last)]
        else:
            if intervals != ((0, first + 1 if first == last else Moving(first + 1, last + 1)),):
                return False
    return True
