"""How many pairs a pattern allows, counted over ranges of queries instead of row by row.

Over long ranges of queries, the ends of a pattern's intervals are constant or move with the query, so that the sizes of
the rows form an arithmetic series. The algebra of intervals works on such moving ends as on integers; where two of them
cross within a range, the range is halved.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from hf_efficient_attn.patterns.intervals import Intervals
from hf_efficient_attn.patterns.work import bounded, spend

# of a pattern with a period up to this, one query per residue class is looked at
MAX_CLASSES = 64
# the time of an interval with moving ends, in intervals of a single row
MOVING_INTERVAL = 8
ADVICE = (
    "Its rows differ nearly everywhere, or are many intervals each: use explain(pattern, query_tokens).allowed_pairs, "
    "which counts by blocks, or fewer tokens."
)

# as `Intervals`, but each end may be an integer or a `Moving`
MovingIntervals = tuple[tuple[Any, Any], ...]


class CrossingError(Exception):
    """Two ends change their order within a range of queries; caught where the range is halved, never seen by users."""


@dataclass(frozen=True)
class Moving:
    """An end of an interval: its values for the first and the last query of a range, linear in between.

    A comparison holds for every query of the range; ends that are equal for some query may count as either.

    Raises:
        CrossingError: comparing two that change their order.
    """

    first: int
    last: int

    def __lt__(self, other: "int | Moving") -> bool:
        return self != other and self._is_at_most(other)

    def __gt__(self, other: "int | Moving") -> bool:
        return not self._is_at_most(other)

    def __le__(self, other: "int | Moving") -> bool:
        return self._is_at_most(other)

    def __ge__(self, other: "int | Moving") -> bool:
        return not self < other

    def _is_at_most(self, other: "int | Moving") -> bool:
        first, last = (other.first, other.last) if isinstance(other, Moving) else (other, other)
        if self.first <= first and self.last <= last:
            return True
        if self.first >= first and self.last >= last:
            return False
        raise CrossingError


class HasIntervals(Protocol):
    """What counting needs of a pattern."""

    kind: ClassVar[str]

    @property
    def period(self) -> int | None:
        """The shift of query and key that changes nothing."""

    def key_intervals(self, first_query: int, last_query: int, num_keys: int) -> Intervals:
        """Return the keys that some query of a range reads."""

    def moving_intervals(self, first_query: int, last_query: int, num_keys: int) -> MovingIntervals:
        """Return the keys of each query of a range."""


def counting(pattern: HasIntervals) -> AbstractContextManager[None]:
    """Return a block that counts the pairs of a pattern, and is refused where it takes too many steps."""
    return bounded(f"Counting the pairs of this {pattern.kind} pattern", ADVICE)


def pairs_of(pattern: HasIntervals, num_queries: int, num_keys: int, query_offset: int) -> int:
    """Return how many pairs a pattern allows; see `Pattern.num_pairs`."""
    with counting(pattern):
        if pattern.period is not None and pattern.period <= min(MAX_CLASSES, num_queries):
            return periodic_pairs(pattern, pattern.period, num_queries, num_keys, query_offset)
        return counted_pairs(pattern, num_queries, num_keys, query_offset)


def counted_pairs(pattern: HasIntervals, num_queries: int, num_keys: int, query_offset: int) -> int:
    """Return how many pairs a pattern allows.

    Raises:
        WorkLimitError: too many of its rows differ.
    """
    ranges = [(query_offset, query_offset + num_queries - 1)] if num_queries > 0 else []
    total = 0
    while ranges:
        first, last = ranges.pop()
        try:
            intervals = pattern.moving_intervals(first, last, num_keys)
        except CrossingError:
            middle = (first + last) // 2
            ranges += [(first, middle), (middle + 1, last)]
            spend(1)
        else:
            sizes = (stop - start for interval in intervals for start, stop in zip(*map(both, interval), strict=True))
            total += (last - first + 1) * sum(sizes) // 2
            spend(1 + len(intervals))
    return total


def periodic_pairs(pattern: HasIntervals, period: int, num_queries: int, num_keys: int, query_offset: int) -> int:
    """Return how many pairs a pattern of this period allows, by looking at one query of each residue class."""
    stop = query_offset + num_queries
    # far enough from both ends that neither cuts off a key
    room = period * -(-(stop + num_keys) // period)
    total = 0
    for query in range(query_offset, query_offset + period):
        intervals = pattern.key_intervals(room + query, room + query, 4 * room)
        spend(len(intervals))
        alike = range(query, stop, period)
        total += sum(
            band_pairs(alike, start - room - query, after - room - query, num_keys) for start, after in intervals
        )
    return total


def both(end: "int | Moving") -> tuple[int, int]:
    """Return the value of an end for the first and for the last query."""
    return (end.first, end.last) if isinstance(end, Moving) else (end, end)


def band_pairs(queries: range, start: int, stop: int, num_keys: int) -> int:
    """Return how many pairs there are of a query q in `queries` and a key in q + start … q + stop - 1.

    >>> band_pairs(range(4), -1, 1, 4)
    7
    """
    return max(0, _keys_before(queries, stop, num_keys) - _keys_before(queries, start, num_keys))


def _keys_before(queries: range, distance: int, num_keys: int) -> int:
    """Return the number of keys before q + distance, summed over all queries q."""
    some, every = (
        min(len(queries), max(0, -((queries.start + distance - limit) // queries.step))) for limit in (0, num_keys)
    )
    inner = queries[some:every]
    moved = len(inner) * (2 * distance + inner[0] + inner[-1]) // 2 if inner else 0
    return moved + num_keys * (len(queries) - every)
