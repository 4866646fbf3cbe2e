"""The keys that a single query reads, as in a step of decoding: found from intervals, without a mask of all keys.

Its tensors are made on the CPU, where token masks can be read without waiting.
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

# keys of all heads between two intervals that are read with a mask, which takes less time than to call a kernel again
MAX_GAP_READS = 1 << 12
# more intervals than these are gathered by an index
MAX_SLICES = 8
# about what Python needs for an interval
INTERVAL_BYTES = 128
# of which a key takes about as long as these that are read where they are
READS_PER_COPY = 4
# heads that read at most this part of what all of them read together are given their own keys, and not those of others
OWN_PART = 0.5


@dataclass(frozen=True, eq=False)
class ReadKeys:
    """The keys that queries read; of single ones most often a few intervals of all keys.

    Attributes:
        intervals: where they are, at least one key; no query reads any other key. Empty: these are all keys.
        mask: 0 where a key is read and -inf elsewhere, [batch or 1, heads or 1, queries, keys that are read]; None: all
            of them are read by every head of every example.
        keyless: which queries read no key, bool [batch or 1, heads or 1, queries, 1]; None: all read some.
        places: in the place of intervals, what each head reads, int64 [batch or 1, heads or 1, keys that are read].
    """

    intervals: Intervals
    mask: Tensor | None = None
    keyless: Tensor | None = None
    places: Tensor | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """Return the keys that are read of a tensor [batch, key heads, keys, width]."""
        if self.places is not None:
            return _taken(tensor, self.places)
        return gathered(tensor, self.intervals) if self.intervals else tensor


_read: BoundedCache[ReadKeys] = BoundedCache(SMALL_BYTES)


def read_keys(layout: Layout, tokens: TokenMask, batch_size: int, dtype: torch.dtype) -> ReadKeys:
    """Return what the only query of a layout reads.

    Args:
        dtype: of the mask.
    """
    if is_idle(tokens):
        return keys_of_query(layout).unmasked or _masked_of_layout(layout, dtype)

    def build() -> ReadKeys:
        return _masked(_by_example(layout, tokens, batch_size), layout, tokens, dtype)

    # the layers of one forward pass share the masks of its examples
    return _read.get_of(tokens.tensors, (layout, batch_size, dtype), build)


@dataclass(frozen=True, eq=False)
class KeysOfQuery:
    """What the heads of a single query read, token masks aside.

    Attributes:
        heads: the keys of each head.
        common: the keys of every head, if all read the same; otherwise none.
        num_computed: of how many keys each head computes scores.
        unmasked: the same keys; None: heads differ, or a mask is faster than several intervals.
    """

    heads: tuple[Intervals, ...]
    common: Intervals
    num_computed: int
    unmasked: ReadKeys | None

    @property
    def num_held_bytes(self) -> int:
        """About what it takes in memory: every step of decoding has one, and to look at all of it takes long."""
        return INTERVAL_BYTES * (len(self.common) or sum(map(len, self.heads)))


@cached()
def keys_of_query(layout: Layout) -> KeysOfQuery:
    """Return what the only query of a layout reads."""
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
    """Return the intervals with small gaps between them filled, unless it takes less time to copy what they hold."""
    gap = MAX_GAP_READS // layout.num_heads
    filled = tuple((start, stop - gap) for start, stop in normalize((start, stop + gap) for start, stop in intervals))
    is_copied = len(intervals) > MAX_SLICES and READS_PER_COPY * size(intervals) < size(filled)
    return intervals if is_copied else filled


def gathered(tensor: Tensor, intervals: Intervals) -> Tensor:
    """Return the given keys of a tensor [batch, heads, keys, width]: a view of a single interval, otherwise a copy."""
    if len(intervals) == 1:
        start, stop = intervals[0]
        return tensor if stop - start == tensor.shape[2] else tensor.narrow(2, start, stop - start)
    if len(intervals) > MAX_SLICES:
        return tensor.index_select(2, places_of([intervals])[0])
    return torch.cat([tensor[:, :, start:stop] for start, stop in intervals], 2)


def _taken(tensor: Tensor, places: Tensor) -> Tensor:
    """Return the keys at the places of each head, or of all key heads, [batch, heads, keys that are read, width]."""
    num_examples, num_key_heads = tensor.shape[:2]
    examples = torch.arange(num_examples, device=tensor.device)[:, None, None]
    # neighbouring heads share a key head
    num_sharing = max(1, places.shape[1] // num_key_heads)
    key_heads = torch.arange(num_key_heads * num_sharing, device=tensor.device) // num_sharing
    return tensor[examples, key_heads[:, None], places]


def _have_own(most: int, together: int) -> bool:
    """Return whether heads get the keys that they read themselves, by the most of one and by those of all of them."""
    return 0 < most <= OWN_PART * together


def _by_example(layout: Layout, tokens: TokenMask, batch_size: int) -> list[Sequence[Intervals]]:
    """Return what each head of the query reads in each example, whose documents may be several with two axes."""
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
    """Return the keys that any head of any example reads, masked where not all of them do."""
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
    """Return what each row, the heads of one example after another, reads; shorter ones are filled up, and masked."""
    counts = torch.tensor(list(map(size, rows)), device=CPU)
    is_read = torch.arange(int(counts.max()), device=CPU) < counts[:, None]
    places = torch.zeros(is_read.shape, dtype=torch.int64, device=CPU)
    places[is_read] = places_of([tuple(interval for intervals in rows for interval in intervals)])[0]
    places = places.view(num_examples, -1, places.shape[1])
    allowed = is_read.view(*places.shape[:2], 1, -1)
    key_mask = tokens.key_mask
    if key_mask is not None:
        # of every example, whose heads may read the same places
        places = places.expand(len(key_mask), -1, -1)
    is_token = None if key_mask is None else _taken(key_mask[:, None, :, None], places).transpose(2, 3)
    allowed = _without_masked(allowed, layout, tokens, is_token)
    mask, keyless = (None, None) if bool(allowed.all()) else additive(allowed, dtype)
    return ReadKeys((), mask, keyless, places)


def _inside(rows: Sequence[Intervals], together: Intervals) -> Tensor:
    """Return which of the keys of `together`, which cover those of every row, each row reads, bool [rows, keys]."""
    # only the keys that some row reads: all those between them would cost what the text is long
    offsets = list(accumulate((stop - start for start, stop in together), initial=0))
    width, starts = offsets[-1] + 1, [start for start, _ in together]
    edges = torch.zeros(len(rows) * width, dtype=torch.int32, device=CPU)
    places: list[list[int]] = [[], []]
    for row, intervals in enumerate(rows):
        shifts = [offsets[part] - starts[part] for part in (bisect(starts, start) - 1 for start, _ in intervals)]
        # what touches without the keys between is joined, so that no place is both a start and a stop
        moved = normalize((start + by, stop + by) for (start, stop), by in zip(intervals, shifts, strict=True))
        for side in (0, 1):
            places[side] += [row * width + interval[side] for interval in moved]
    edges[places[0]], edges[places[1]] = 1, -1
    return edges.view(len(rows), width).cumsum(1)[:, :-1] > 0


def _without_masked(allowed: Tensor, layout: Layout, tokens: TokenMask, is_token: Tensor | None) -> Tensor:
    """Return the pairs of tokens that are not masked themselves; documents begin and end with such tokens.

    is_token: which of the keys are not masked, [batch, heads or 1, 1, keys]; None: all.
    """
    if is_token is not None:
        allowed = allowed & is_token
    of_queries = tokens.query_mask if layout.is_cross else tokens.key_mask
    return allowed if of_queries is None else allowed & of_queries[:, None, layout.queries, None]


# Layouts whose queries read the same keys, or a triangle of them, so that no mask is needed.


def maskless(layout: Layout) -> tuple[int, int, bool] | None:
    """Return (start, stop, is_causal) if no mask is needed over the keys start … stop - 1; None if one is.

    Either every query of every head reads all of these keys, or query i reads them up to the i-th.
    """
    if not torch.compiler.is_compiling():
        return _of_single(layout) if layout.num_queries == 1 else _of_intervals(layout)
    # a compiler cannot trace the intervals of patterns
    return _of_limits(layout)


def _of_limits(layout: Layout) -> tuple[int, int, bool] | None:
    """Return the same from the limits of a band that has none on the left."""
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
    """Return whether each query q of 0..last reads exactly the keys 0..q; False also where that takes long to say."""
    if pattern.band_limits == (None, 0):
        return True
    try:
        with work_budget("Looking for a causal triangle", share=SMALL_SHARE):
            return _rows_form_triangle(pattern, last, num_keys)
    except WorkLimitError:
        return False


def _rows_form_triangle(pattern: Pattern, last: int, num_keys: int) -> bool:
    # the last row alone tells of most patterns that they differ
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
