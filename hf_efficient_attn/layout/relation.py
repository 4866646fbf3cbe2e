"""Which of many pairs a pattern allows, in a few operations for each: what `Pattern.allowed` says of them all."""

from collections import Counter

import torch
from torch import Tensor

from hf_efficient_attn.patterns.pattern import Pattern
from hf_efficient_attn.patterns.work import spend

# of work, what a look at tensors takes however few pairs there are
STEPS_PER_TENSORS = 64
# parts that occur again are kept until then, at most so many
MAX_KEPT = 8
# so many intervals of a query are few, however few keys there are
FEW_INTERVALS = 64
# entries of a table of intervals of all queries
MAX_TABLE = 1 << 22
# below so many pairs, and for patterns of which more than one query in so many differs, copies take as long
MIN_COPIED_PAIRS = 1 << 14
MIN_COPIES = 4


class RowTables:
    """The row intervals of the parts of a pattern for many queries, to be looked up where they are asked for again.

    queries: positions, int64 [1, queries, 1].
    """

    def __init__(self, queries: Tensor) -> None:
        self.queries = queries
        self.known: dict[int, tuple[Pattern, tuple[Tensor, ...] | None]] = {}

    def at(self, pattern: Pattern, places: Tensor) -> list[tuple[Tensor, Tensor]] | None:
        """Return the row intervals of the queries at some places, [rows, queries]; None: they are not known."""
        if id(pattern) not in self.known:
            found = pattern.row_intervals(self.queries, MAX_TABLE // self.queries.numel())
            ends = None if found is None else tuple(torch.cat(each, 2)[0] for each in zip(*found, strict=True))
            self.known[id(pattern)] = pattern, ends
        ends = self.known[id(pattern)][1]
        return None if ends is None else [(ends[0][places], ends[1][places])]


def relation(
    pattern: Pattern, queries: Tensor, keys: Tensor, tables: RowTables | None = None, places: Tensor | None = None
) -> Tensor:
    """Return `pattern.allowed(queries, keys)` on the CPU, bool [rows, queries, keys].

    Args:
        pattern: with lookup tables as tensors; see `Pattern.with_tables`.
        queries, keys: positions, int64 [rows, queries, 1] and [rows, 1, keys].
        tables, places: of intervals, and the places of the queries there, int64 [rows, queries].
    """
    shape = (len(keys), queries.shape[1], keys.shape[2])
    period = pattern.period
    if (
        period is not None
        and period * MIN_COPIES <= shape[1]
        and shape[1] * shape[2] >= MIN_COPIED_PAIRS
        and is_contiguous(queries[:, :, 0])
        and is_contiguous(keys[:, 0])
    ):
        return _copied(pattern, period, queries, keys)
    is_sorted = bool((keys[..., 1:] >= keys[..., :-1]).all())
    look = Relation(queries, is_sorted, repeated(pattern), tables, places)
    return look.of(pattern, queries, keys).expand(shape)


def is_contiguous(positions: Tensor) -> bool:
    """Return whether the positions in each row, [rows, positions], are neighbours in their order."""
    return bool((positions[:, 1:] - positions[:, :-1] == 1).all())


def _copied(pattern: Pattern, period: int, queries: Tensor, keys: Tensor) -> Tensor:
    """Return the same for neighbouring positions: of each class of queries the last row, of which others are copies."""
    num_keys = keys.shape[2]
    found = torch.empty(len(keys), queries.shape[1], num_keys, dtype=torch.bool)
    for first in range(period):
        rows = found[:, first::period]
        # a query moved on so far reads, counted from its place, what all of them do
        room = period * (rows.shape[1] - 1)
        wide = keys[:, :, :1] + torch.arange(room + num_keys)
        moved = relation(pattern, queries[:, first : first + 1] + room, wide)
        rows.copy_(moved[:, 0].unfold(1, num_keys, period).flip(1))
    return found


def repeated(pattern: Pattern) -> set[Pattern]:
    """Return a few parts that occur more than once, those that occur most."""
    counts: Counter[Pattern] = Counter()
    left = list(pattern.parts)
    while left:
        part = left.pop()
        counts[part] += 1
        left += part.parts
    return {part for part, count in counts.most_common(MAX_KEPT) if count > 1}


class Relation:
    """Looks at the parts of one pattern; those of `kept` once."""

    def __init__(
        self, queries: Tensor, is_sorted: bool, kept: set[Pattern], tables: RowTables | None, places: Tensor | None
    ) -> None:
        self.queries, self.is_sorted, self.kept = queries, is_sorted, kept
        self.tables, self.places = tables, places
        self.found: dict[Pattern, Tensor] = {}

    def of(self, pattern: Pattern, queries: Tensor, keys: Tensor) -> Tensor:
        """Return which pairs a part allows, of positions as they are, or in blocks."""
        is_kept = queries is self.queries and pattern in self.kept
        if is_kept and pattern in self.found:
            return self.found[pattern]
        found = self._look(pattern, queries, keys)
        if is_kept:
            self.found[pattern] = found
        return found

    def _look(self, pattern: Pattern, queries: Tensor, keys: Tensor) -> Tensor:
        spend(STEPS_PER_TENSORS)
        intervals = self._intervals(pattern, queries, keys.shape[2]) if self.is_sorted else None
        if intervals is not None:
            return filled(intervals, queries, keys)
        composed = pattern.composed(self.of, queries, keys)
        return pattern.allowed(queries, keys) if composed is None else composed

    def _intervals(self, pattern: Pattern, queries: Tensor, num_keys: int) -> list[tuple[Tensor, Tensor]] | None:
        found = None
        if self.tables is not None and self.places is not None and queries is self.queries:
            found = self.tables.at(pattern, self.places)
        return pattern.row_intervals(queries, FEW_INTERVALS + num_keys) if found is None else found


def filled(intervals: list[tuple[Tensor, Tensor]], queries: Tensor, keys: Tensor) -> Tensor:
    """Return which keys lie in one of the intervals of each query, bool [rows, queries, keys].

    Counts the intervals that begin before a key less those that end before it; in memory of 16 bits for every pair.
    """
    starts, stops = (torch.cat(ends, 2) for ends in zip(*intervals, strict=True))
    order = keys[:, 0].contiguous()
    places = [torch.searchsorted(order, ends.reshape(len(ends), -1)).view(ends.shape) for ends in (starts, stops)]
    dtype = torch.int16 if starts.shape[2] < 1 << 15 else torch.int32
    changes = torch.zeros(*queries.shape[:2], keys.shape[2] + 1, dtype=dtype)
    one = torch.ones((), dtype=dtype).expand(starts.shape)
    changes.scatter_add_(2, places[0], one)
    changes.scatter_add_(2, torch.maximum(*places), -one)
    return changes[..., :-1].cumsum(2, dtype=dtype) > 0
