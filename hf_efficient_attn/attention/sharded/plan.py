"""Plans of sharded attention: the queries that can be computed before all keys arrive, and how much is sent."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from hf_efficient_attn.attention.sharded.shards import (
    HALO,
    HEADS,
    Bounds,
    KeyExchange,
    TokenSequence,
    document_patterns,
    read_keys,
    shard_bounds,
    shifted,
    without,
)
from hf_efficient_attn.layout.cache import cached
from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.layout.token_mask import Document
from hf_efficient_attn.patterns.algebra import PerHead, Union, common_period
from hf_efficient_attn.patterns.global_tokens import GlobalTokens
from hf_efficient_attn.patterns.intervals import Intervals, intersect, size, union
from hf_efficient_attn.patterns.pattern import Pattern
from hf_efficient_attn.patterns.tables import GatheredKeys

# The keys and values that a process holds, its own and those that it has received, by their positions.


@dataclass(frozen=True)
class HeldKeys:
    """Keys and values, [B, Hkv, K, ·], and the intervals of their positions, in the same order."""

    key: Tensor
    value: Tensor
    positions: Intervals

    def slices(self, wanted: Intervals) -> list[tuple[int, int]]:
        """Return the slices of the held keys that have the wanted positions."""
        found, place = [], 0
        for start, stop in self.positions:
            for first, last in intersect(wanted, ((start, stop),)):
                found.append((first - start + place, last - start + place))
            place += stop - start
        return found


def keys_at(held: Sequence[HeldKeys], wanted: Intervals) -> HeldKeys:
    """Return the held keys at the wanted positions; `held` is in the order of positions."""
    pieces = [(each, slices) for each in held if (slices := each.slices(wanted))] or [(held[0], [(0, 0)])]
    keys = [cut_tokens(each.key, slices) for each, slices in pieces]
    values = [cut_tokens(each.value, slices) for each, slices in pieces]
    key, value = (each[0] if len(each) == 1 else torch.cat(each, 2) for each in (keys, values))
    return HeldKeys(key, value, union(*(intersect(wanted, each.positions) for each in held)))


def cut_tokens(states: Tensor, slices: Sequence[tuple[int, int]]) -> Tensor:
    """Return slices of the tokens of [B, H, N, ·], concatenated; a view if there is only one."""
    if len(slices) == 1:
        return states[:, :, slice(*slices[0])]
    return torch.cat([states[:, :, :0], *(states[:, :, start:stop] for start, stop in slices)], 2)


def split_received(rows: Tensor, positions: Intervals, own: tuple[int, int], head_dim: int) -> list[HeldKeys]:
    """Return the received keys and values before the tokens of the process, and those after them.

    rows: [tokens, B, Hkv, D + Dv], in the order of their positions.
    """
    before, after = sides(positions, own)
    states = rows.permute(1, 2, 0, 3)
    split = size(before)
    return [
        HeldKeys(part[..., :head_dim], part[..., head_dim:], where)
        for part, where in ((states[:, :, :split], before), (states[:, :, split:], after))
    ]


def sides(positions: Intervals, own: tuple[int, int]) -> tuple[Intervals, Intervals]:
    """Return the positions of other processes before the tokens of a process, and those after them."""
    return intersect(positions, ((0, own[0]),)), tuple(each for each in positions if each[0] >= own[1])


@dataclass(frozen=True)
class RowPart:
    """Consecutive queries of one document that are computed at once.

    Attributes:
        first, stop: the range of their positions in the sequence.
        keys: intervals of positions that include all held keys that the queries attend to.
        is_inner: whether the queries need only keys of the process itself and keys that travel first.
    """

    document: Document
    first: int
    stop: int
    keys: Intervals
    is_inner: bool


@cached()
def row_parts(
    layout: Layout, sequence: TokenSequence, own: tuple[int, int], received: Intervals, early: Intervals = ()
) -> tuple[RowPart, ...]:
    """Return the parts of a process's queries of a sequence, in their order.

    Args:
        layout: the layout of whole sequences.
        own: the tokens that the process holds.
        received: intervals of positions whose keys it gets from others.
        early: the part of `received` that travels first.
    """
    parts = []
    late = without(received, early)
    (before, after), (early_before, early_after) = sides(received, own), sides(early, own)
    for document in sequence.documents:
        first, stop = max(document.start, own[0]), min(document.stop, own[1])
        if first >= stop:
            continue
        read = partial(read_by, document_patterns(layout, document), document, sequence.tokens)
        start, end = inner_rows(first, stop, lambda *rows, read=read: bool(intersect(read(*rows), late)))
        for rows, is_inner in (((first, start), False), ((start, end), True), ((end, stop), False)):
            if rows[0] < rows[1]:
                held = (early_before, (own,), early_after) if is_inner else (before, (own,), after)
                # including the positions of the rows, since backends count queries among the keys
                keys = hull_of_each(union(read(*rows), (rows,)), [intersect(sequence.tokens, each) for each in held])
                parts.append(RowPart(document, *rows, keys, is_inner))
    return tuple(parts)


def read_by(patterns: Sequence[Pattern], document: Document, tokens: Intervals, first: int, stop: int) -> Intervals:
    """Return intervals with all unmasked keys of a document that any of the queries may attend to."""
    found = read_keys(patterns, ((first - document.start, stop - document.start),), document)
    return intersect(shifted(found, document.start), intersect(tokens, ((document.start, document.stop),)))


def inner_rows(first: int, stop: int, attends_to_others: Callable[[int, int], bool]) -> tuple[int, int]:
    """Return the range of rows around the middle that need no late keys of other processes.

    The range is empty, from `first` to `first`, if it would have fewer than half of all rows.

    >>> inner_rows(0, 20, lambda start, end: start < 3 or end > 18)
    (3, 18)
    """
    middle = (first + stop) // 2
    if attends_to_others(middle, middle + 1):
        return first, first
    low, high = first, middle
    while low < high:
        between = (low + high) // 2
        low, high = (between + 1, high) if attends_to_others(between, middle + 1) else (low, between)
    start, low, high = low, middle + 1, stop
    while low < high:
        between = (low + high + 1) // 2
        low, high = (low, between - 1) if attends_to_others(middle, between) else (between, high)
    return (start, low) if 2 * (low - start) >= stop - first else (first, first)


def hull_of_each(read: Intervals, held: Sequence[Intervals]) -> Intervals:
    """Return the positions of every set from its first to its last one in `read`.

    These may be more positions than necessary, but they are contiguous, for which backends are fastest.
    """
    found = []
    for positions in held:
        common = intersect(read, positions)
        if common:
            found.append(intersect(positions, ((common[0][0], common[-1][1]),)))
    return union(*found)


# The pattern of some queries of a sequence over the held keys, which get new positions, in a form that is fast.


@dataclass(frozen=True)
class ReindexedPattern:
    """A pattern over held keys, among which the first query has the position `query_offset`.

    Attributes:
        is_cross: whether positions of queries count tokens of the sequence, and positions of keys count held keys.
        keeps_distances: whether queries and keys are as far from each other as in the sequence.
    """

    pattern: Pattern
    query_offset: int
    is_cross: bool = False
    keeps_distances: bool = True


def reindex_pattern(pattern: Pattern, keys: Intervals, first: int, num_queries: int) -> ReindexedPattern:
    """Return the pattern of queries from position `first` on over the concatenated keys of some intervals.

    If the keys are one interval, and the pattern is the same from its start on, the result is the pattern itself, for
    which every backend is fastest. If all other keys are global tokens, only their positions change.

    >>> from hf_efficient_attn.patterns.bands import Band
    >>> reindex_pattern(Band(2, 0), ((6, 12),), 8, 4)
    ReindexedPattern(pattern=Band(left=2, right=0), query_offset=2, is_cross=False, keeps_distances=True)
    """
    stop = first + num_queries
    if len(keys) == 1 and keys[0][0] <= first and stop <= keys[0][1]:
        start, period = keys[0][0], pattern.period
        if start == 0 or (period is not None and start % period == 0):
            return ReindexedPattern(pattern, first - start)
    reach = pattern.decoding_reach() if pattern.is_causal else None
    if reach is not None and reach.left is not None and len(keys) == 2 and keys[1][1] >= stop:
        (begin, num_first), (start, _) = keys
        if begin == 0 and num_first >= reach.num_first and start <= first - reach.left:
            return ReindexedPattern(pattern, first - start + num_first, keeps_distances=False)
    reindexed = reindex_globals(pattern, keys, first, stop)
    # a process may hold no key of a document if all its tokens there are masked
    return reindexed or ReindexedPattern(GatheredKeys(pattern, keys or ((0, 1),)), first, True, False)


def reindex_globals(pattern: Pattern, keys: Intervals, first: int, stop: int) -> ReindexedPattern | None:
    """Return the pattern if all keys except the neighbours of the queries are global tokens; None otherwise.

    Then only the positions of global tokens change, since distances of queries and keys matter only between neighbours.
    Everything must attend to these tokens. None is also returned for patterns with other parts that would change.

    >>> from hf_efficient_attn.patterns.bands import Band
    >>> reindex_globals(Band(1, 1) | GlobalTokens([0, 9]), ((0, 1), (7, 12)), 8, 11).pattern.parts[1].positions
    (0, 3)
    """
    number = next((place for place, (start, end) in enumerate(keys) if start <= first and stop <= end), None)
    if number is None:
        return None
    place = sum(end - start for start, end in keys[:number])
    shift = keys[number][0] - place
    others = (*keys[:number], *keys[number + 1 :])
    heads = pattern.patterns if isinstance(pattern, PerHead) else (pattern,)
    moved = [found for each in heads if (found := move_globals(each, keys, others, shift)) is not None]
    if len(moved) < len(heads):
        return None
    together = PerHead(moved) if isinstance(pattern, PerHead) else moved[0]
    return ReindexedPattern(together, first - shift, keeps_distances=False)


def move_globals(pattern: Pattern, keys: Intervals, others: Intervals, shift: int) -> Pattern | None:
    """Return a pattern with its global tokens counted among the held keys; None if other parts would also change.

    Args:
        others: intervals of the keys that are not neighbours of the queries.
        shift: by how much the positions of neighbours decrease.
    """
    parts = pattern.parts if isinstance(pattern, Union) else (pattern,)
    global_parts = [each for each in parts if isinstance(each, GlobalTokens)]
    local = [each for each in parts if not isinstance(each, GlobalTokens)]
    period = common_period(each.period for each in local)
    attended_by_all = {position for each in global_parts if each.attended_by_all for position in each.positions}
    if not local or period is None or shift % period or size(others) > len(attended_by_all):
        return None
    if any(position not in attended_by_all for each in others for position in range(*each)):
        return None
    moved = []
    for each in global_parts:
        places = tuple(place for position in each.positions if (place := index_among(keys, position)) is not None)
        moved += [replace(each, positions=places)] if places else []
    return Union((*local, *moved)) if len(local) + len(moved) > 1 else local[0]


def index_among(keys: Intervals, position: int) -> int | None:
    """Return the place of a position among the keys of some intervals; None if it is in none of them.

    >>> index_among(((0, 2), (5, 9)), 6)
    3
    """
    place = 0
    for start, stop in keys:
        if start <= position < stop:
            return place + position - start
        place += stop - start
    return None


# How much the processes that share a sequence send in one layer, for each way of exchange.


@dataclass(frozen=True)
class HeadSizes:
    """The numbers of query heads and key heads of a layer, and the widths of keys and values.

    Attributes:
        term_values: how many values terms have for each query of a head.
    """

    num_heads: int
    num_key_heads: int
    head_dim: int
    value_dim: int
    term_values: int = 0


@dataclass(frozen=True)
class Traffic:
    """How many numbers each process sends and receives in the forward pass of one layer, for one example.

    The backward pass sends gradients the other way, so each process sends the count that it has received.

    Attributes:
        mode: "halo" or "heads".
        sent, received: the count of numbers in keys, values, queries and outputs that each process sends and receives.
        reduced, reduced_backward: the count of numbers that all processes add up (all-reduce) for wide queries, in the
            forward and in the backward pass.
    """

    mode: str
    sent: tuple[int, ...]
    received: tuple[int, ...]
    reduced: int = 0
    reduced_backward: int = 0

    @property
    def most(self) -> int:
        """The largest count that any process receives; numbers that are added up are sent twice."""
        return max(self.received) + 2 * self.reduced


def halo_traffic(exchange: KeyExchange, bounds: Bounds, sizes: HeadSizes) -> Traffic:
    """Return the traffic of the halo: keys and values, and the wide queries."""
    of_key = sizes.num_key_heads * (sizes.head_dim + sizes.value_dim)
    of_query = sizes.num_heads * sizes.head_dim
    num_wide = size(exchange.wide_positions)
    sent, received = [], []
    for own, wanted in zip(bounds, exchange.wanted, strict=True):
        wide = size(intersect(exchange.wide_positions, (own,)))
        num_keys = sum(size(intersect(others, (own,))) for others in exchange.wanted)
        sent.append(num_keys * of_key + wide * (len(bounds) - 1) * of_query)
        received.append(size(wanted) * of_key + (num_wide - wide) * of_query)
    outputs = num_wide * sizes.num_heads * sizes.value_dim
    # the forward pass also reduces the highest log-sum-exp and the weights of the processes
    return Traffic(HALO, tuple(sent), tuple(received), outputs + 2 * num_wide * sizes.num_heads, outputs)


def heads_traffic(bounds: Bounds, sizes: HeadSizes) -> Traffic:
    """Return the traffic of the exchange of heads: queries, their terms, keys, values and outputs."""
    num_shards, num_tokens = len(bounds), bounds[-1][1]
    num_key_heads = repeated_heads(sizes.num_key_heads, sizes.num_heads, num_shards)
    key_heads = shard_bounds(num_key_heads, num_shards)
    sent, received = [], []
    for (first, stop), (head, end), (key_head, key_end) in zip(
        bounds, shard_bounds(sizes.num_heads, num_shards), key_heads, strict=True
    ):
        own, foreign = stop - first, num_tokens - (stop - first)
        heads, of_keys = end - head, key_end - key_head
        of_query, of_key = sizes.head_dim + sizes.term_values, sizes.head_dim + sizes.value_dim
        there = (sizes.num_heads - heads) * of_query + (num_key_heads - of_keys) * of_key
        sent.append(own * there + foreign * heads * sizes.value_dim)
        here = heads * of_query + of_keys * of_key
        received.append(foreign * here + own * (sizes.num_heads - heads) * sizes.value_dim)
    return Traffic(HEADS, tuple(sent), tuple(received))


def repeated_heads(num_key_heads: int, num_heads: int, num_shards: int) -> int:
    """Return the number of key heads after repetition, so that each process gets those of its query heads."""
    if num_key_heads % num_shards == 0:
        return num_key_heads
    return num_shards if num_shards % num_key_heads == 0 and num_heads % num_shards == 0 else num_heads


def gather_traffic(bounds: Bounds, sizes: HeadSizes) -> Traffic:
    """Return the traffic of gathering all keys and values, as other engines do."""
    of_key = sizes.num_key_heads * (sizes.head_dim + sizes.value_dim)
    lengths, num_tokens = [stop - first for first, stop in bounds], bounds[-1][1]
    sent = tuple(length * (len(bounds) - 1) * of_key for length in lengths)
    return Traffic("all-gather", sent, tuple((num_tokens - length) * of_key for length in lengths))
