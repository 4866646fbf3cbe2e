"""Sets of key positions as half-open intervals, in which patterns give keys without listing them."""

from collections.abc import Iterable
from itertools import pairwise

from hf_efficient_attn.patterns.work import STEPS_PER_LOOK, spend

# sorted, disjoint, not touching; (start, stop) contains start, start + 1, ..., stop - 1
Intervals = tuple[tuple[int, int], ...]


def normalize(intervals: Iterable[tuple[int, int]]) -> Intervals:
    """Return the same positions with the intervals sorted, empty ones removed, overlapping or touching ones joined.

    >>> normalize([(5, 7), (0, 2), (2, 3), (9, 9)])
    ((0, 3), (5, 7))
    """
    listed = sorted(intervals)
    spend(STEPS_PER_LOOK + len(listed))
    joined: list[tuple[int, int]] = []
    for start, stop in listed:
        if start >= stop:
            continue
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return tuple(joined)


def union(*many: Intervals) -> Intervals:
    """Return the positions that lie in any of `many`."""
    return normalize(interval for intervals in many for interval in intervals)


def intersect(first: Intervals, second: Intervals) -> Intervals:
    """Return the positions that lie in both.

    >>> intersect(((0, 4), (6, 9)), ((3, 7),))
    ((3, 4), (6, 7))
    """
    spend(STEPS_PER_LOOK + len(first) + len(second))
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
    """Return the positions 0 to num_keys - 1 that do not lie in `intervals`.

    >>> complement(((2, 4),), 6)
    ((0, 2), (4, 6))
    """
    edges = [(0, 0), *clip(intervals, num_keys), (num_keys, num_keys)]
    return tuple((before[1], after[0]) for before, after in pairwise(edges) if before[1] < after[0])


def clip(intervals: Iterable[tuple[int, int]], num_keys: int) -> Intervals:
    """Return the sorted `intervals` clipped to the keys 0 to num_keys - 1."""
    cut = [(max(start, 0), min(stop, num_keys)) for start, stop in intervals]
    spend(STEPS_PER_LOOK + len(cut))
    return tuple(interval for interval in cut if interval[0] < interval[1])


def size(intervals: Intervals) -> int:
    """Return the number of positions."""
    return sum(stop - start for start, stop in intervals)
