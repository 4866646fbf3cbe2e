"""Rows of blocks: what a block of queries reads, and which rows can be computed together."""

from dataclasses import dataclass

from hf_efficient_attn.patterns.intervals import Intervals, size

# if intervals fill more than this share of their hull, reading the gaps, too, is cheaper than gathering
DENSE_HULL = 0.8


@dataclass(frozen=True)
class Row:
    """A block of queries at places `first` … `first + tokens - 1`, and the places of the keys that it reads."""

    first: int
    tokens: int
    intervals: Intervals
    is_full: bool = False

    @property
    def num_pairs(self) -> int:
        """The number of pairs of its queries and the keys that they read."""
        return self.tokens * size(self.intervals)


def without_small_gaps(intervals: Intervals) -> Intervals:
    """Return one interval instead of several that fill most of it."""
    if len(intervals) > 1 and size(intervals) >= DENSE_HULL * (intervals[-1][1] - intervals[0][0]):
        return ((intervals[0][0], intervals[-1][1]),)
    return intervals


def can_merge(row: Row, after: Row, max_pairs: int) -> bool:
    """Return whether two neighbouring rows read the same keys and are small or full enough to be one block."""
    if row.intervals != after.intervals:
        return False
    return (row.is_full and after.is_full) or (row.tokens + after.tokens) * size(row.intervals) <= max_pairs


def union_of_parts(*parts: Intervals) -> Intervals:
    """Return the intervals of all parts in their order, without joining any."""
    return tuple(sorted(interval for intervals in parts for interval in intervals))


def row_step(group: list[Row]) -> int:
    """Return how many keys after the previous row each row of a group starts to read."""
    return group[1].intervals[0][0] - group[0].intervals[0][0] if len(group) > 1 else 0


def can_join(group: list[Row], row: Row) -> bool:
    """Return whether `row` continues the run of `group`."""
    last = group[-1]
    # queries that read nothing have no row, and may lie in between
    if row.first != last.first + last.tokens:
        return False
    if row.tokens != last.tokens or row.is_full != last.is_full or size(row.intervals) != size(last.intervals):
        return False
    if len(row.intervals) > 1 or len(last.intervals) > 1:
        return len(row.intervals) > 1 and len(last.intervals) > 1
    step = row.intervals[0][0] - last.intervals[0][0]
    return step >= 0 and (len(group) == 1 or step == row_step(group))
