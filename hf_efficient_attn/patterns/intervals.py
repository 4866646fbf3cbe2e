"""Sets of key positions as half-open intervals: their algebra, counts of pairs, and limits on the work for both."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Protocol

from hf_efficient_attn.errors import ConfigurationError, WorkLimitError
from hf_efficient_attn.messages import shown

# Limits on the work that a computation on a pattern may take. Work is counted in steps, so that the limit is the same
# on every machine.
#
# A step is the work for one interval of keys, a microsecond or less. Functions that make intervals charge steps. A
# computation is refused if it needs more than MAX_STEPS steps, or, for long inputs, more than STEPS_PER_ROW steps for
# each query of each head, which is the higher limit there. Computing a cached value, such as a compiled layout, has a
# budget of its own, so that no result depends on what was computed before.


# for one computation: most of a second
MAX_STEPS = 3 << 18
# for each query of each head, because longer inputs may take longer
STEPS_PER_ROW = 40
# the fixed cost of one operation on intervals, however few they are
STEPS_PER_LOOK = 2
# optional computations, such as those for a warning, may take 1 / SMALL_SHARE of the steps
SMALL_SHARE = 8
ADVICE = (
    "Nearly all rows of the pattern differ, or each row has many intervals. Use whole blocks (Blocks), combine fewer "
    "patterns or single positions, or use shorter inputs."
)


class WorkBudget:
    """A counter of the steps of one computation.

    what: what is computed, as the beginning of a sentence. advice: what to do if it takes too many steps.
    max_steps: the largest number of steps that is not refused.
    """

    def __init__(self, what: str, advice: str, max_steps: int) -> None:
        self.what, self.advice, self.max_steps = what, advice, max_steps
        self.num_steps = 0

    def charge(self, num_steps: int) -> None:
        """Add steps to the count.

        Raises:
            WorkLimitError: the total is more than `max_steps`.
        """
        self.num_steps += num_steps
        if self.num_steps > self.max_steps:
            raise WorkLimitError(
                f"{self.what} would take more than {self.max_steps:,} steps of about a microsecond each. {self.advice}"
            )


# the budget of the current computation in this thread
_budget: ContextVar[WorkBudget | None] = ContextVar("budget", default=None)


@contextmanager
def work_budget(what: str, advice: str = ADVICE, share: int = 1, num_rows: int = 0) -> Iterator[None]:
    """Limit the steps of the computation inside the `with` block; more steps raise WorkLimitError.

    Args:
        what, advice: as in `WorkBudget`.
        share: the limit is divided by this number.
        num_rows: number of queries that are computed, in all heads together.
    """
    token = _budget.set(WorkBudget(what, advice, max(MAX_STEPS, STEPS_PER_ROW * num_rows) // share))
    try:
        yield
    finally:
        _budget.reset(token)


def charge(num_steps: int) -> None:
    """Count steps of the current `work_budget`; outside of one, nothing is counted.

    Raises:
        WorkLimitError: the budget is exceeded.
    """
    budget = _budget.get()
    if budget is not None:
        budget.charge(num_steps)


# sorted, disjoint, not touching; (start, stop) contains start, start + 1, ..., stop - 1
Intervals = tuple[tuple[int, int], ...]


def normalize(intervals: Iterable[tuple[int, int]]) -> Intervals:
    """Return the same positions with the intervals sorted, empty ones removed, overlapping or touching ones joined.

    >>> normalize([(5, 7), (0, 2), (2, 3), (9, 9)])
    ((0, 3), (5, 7))
    """
    listed = sorted(intervals)
    charge(STEPS_PER_LOOK + len(listed))
    joined: list[tuple[int, int]] = []
    for start, stop in listed:
        if start >= stop:
            continue
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return tuple(joined)


def checked_intervals(kind: str, intervals: Iterable[tuple[int, int]], num_keys: int) -> Intervals:
    """Return the intervals that a pattern has given for some queries, after checking them.

    kind: the kind of the pattern, which may be a class that a user has written.

    Raises:
        ConfigurationError: intervals are not sorted, overlap, are empty, or lie outside 0 to num_keys.
    """
    listed = tuple(intervals)
    edges = [edge for interval in listed for edge in interval]
    # intervals may touch
    is_sorted = all(start < stop for start, stop in listed) and all(a <= b for a, b in pairwise(edges))
    if listed and not (is_sorted and edges[0] >= 0 and edges[-1] <= num_keys):
        raise ConfigurationError(
            f"{kind}: key_intervals returned {shown(listed)} for {num_keys} keys; intervals must be sorted, disjoint, "
            "not empty, and between 0 and the number of keys. Return clip(normalize(intervals), num_keys), from "
            "hf_efficient_attn.patterns.intervals."
        )
    return listed


def union(*many: Intervals) -> Intervals:
    """Return the positions that lie in any of `many`."""
    return normalize(interval for intervals in many for interval in intervals)


def intersect(first: Intervals, second: Intervals) -> Intervals:
    """Return the positions that lie in both `first` and `second`.

    >>> intersect(((0, 4), (6, 9)), ((3, 7),))
    ((3, 4), (6, 7))
    """
    charge(STEPS_PER_LOOK + len(first) + len(second))
    common: list[tuple[int, int]] = []
    i = j = 0
    while i < len(first) and j < len(second):
        start, stop = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < stop:
            common.append((start, stop))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return tuple(common)


def complement(intervals: Intervals, num_keys: int) -> Intervals:
    """Return the positions from 0 to num_keys - 1 that do not lie in `intervals`.

    >>> complement(((2, 4),), 6)
    ((0, 2), (4, 6))
    """
    edges = [(0, 0), *clip(intervals, num_keys), (num_keys, num_keys)]
    return tuple((before[1], after[0]) for before, after in pairwise(edges) if before[1] < after[0])


def clip(intervals: Iterable[tuple[int, int]], num_keys: int) -> Intervals:
    """Return the sorted `intervals` clipped to the keys 0 to num_keys - 1."""
    cut = [(max(start, 0), min(stop, num_keys)) for start, stop in intervals]
    charge(STEPS_PER_LOOK + len(cut))
    return tuple(interval for interval in cut if interval[0] < interval[1])


def size(intervals: Intervals) -> int:
    """Return the number of positions."""
    return sum(stop - start for start, stop in intervals)


# How many pairs a pattern allows, counted over ranges of queries instead of row by row.
#
# Over long ranges of queries, the ends of a pattern's intervals are constant or move with the query, so that the sizes
# of the rows form an arithmetic series. The algebra of intervals works with such moving ends as it does with integers.
# If two ends cross within a range, the range is halved.


# patterns with a period up to this are counted by one query per residue class
MAX_CLASSES = 64
# an interval with moving ends takes the time of this many intervals of a single row
MOVING_INTERVAL = 8
COUNTING_ADVICE = (
    "Nearly all rows of the pattern differ, or each row has many intervals. Use "
    "explain(pattern, query_tokens).allowed_pairs, which counts by blocks, or fewer tokens."
)

# like `Intervals`, but each end is an integer or a `Moving`
MovingIntervals = tuple[tuple[Any, Any], ...]


class CrossingError(Exception):
    """Two ends change their order within a range of queries; callers catch it and halve the range."""


@dataclass(frozen=True)
class Moving:
    """An end of an interval: its values for the first and the last query of a range, linear in between.

    The result of a comparison holds for every query of the range, except for queries at which the ends are equal: these
    may count as either.

    Raises:
        CrossingError: two compared ends change their order within the range.
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
    """The methods of a pattern that counting needs."""

    kind: ClassVar[str]

    @property
    def period(self) -> int | None:
        """A shift of query and key that changes nothing; None: unknown."""

    def key_intervals(self, first_query: int, last_query: int, num_keys: int) -> Intervals:
        """Return the keys that at least one query of a range attends to."""

    def moving_intervals(self, first_query: int, last_query: int, num_keys: int) -> MovingIntervals:
        """Return the keys of each query of a range."""


def counting(pattern: HasIntervals) -> AbstractContextManager[None]:
    """Return the work budget for counting the pairs of a pattern."""
    return work_budget(f"Counting the pairs of this {pattern.kind} pattern", COUNTING_ADVICE)


def pairs_of(pattern: HasIntervals, num_queries: int, num_keys: int, query_offset: int) -> int:
    """Return how many pairs a pattern allows; see `Pattern.num_pairs`."""
    with counting(pattern):
        if pattern.period is not None and pattern.period <= min(MAX_CLASSES, num_queries):
            return periodic_pairs(pattern, pattern.period, num_queries, num_keys, query_offset)
        return counted_pairs(pattern, num_queries, num_keys, query_offset)


def counted_pairs(pattern: HasIntervals, num_queries: int, num_keys: int, query_offset: int) -> int:
    """Return how many pairs a pattern allows.

    Raises:
        WorkLimitError: its rows differ too often.
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
            charge(1)
        else:
            sizes = (stop - start for interval in intervals for start, stop in zip(*map(both, interval), strict=True))
            total += (last - first + 1) * sum(sizes) // 2
            charge(1 + len(intervals))
    return total


def periodic_pairs(pattern: HasIntervals, period: int, num_queries: int, num_keys: int, query_offset: int) -> int:
    """Return how many pairs a pattern of this period allows, by looking at one query of each residue class."""
    stop = query_offset + num_queries
    # far enough from both ends of the axis that no key is cut off
    room = period * -(-(stop + num_keys) // period)
    total = 0
    for query in range(query_offset, query_offset + period):
        intervals = pattern.key_intervals(room + query, room + query, 4 * room)
        charge(len(intervals))
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
