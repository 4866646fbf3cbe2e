"""Layouts whose queries read the same keys, or a triangle of them, so that no mask is needed."""

import torch

from hf_efficient_attn.errors import WorkLimitError
from hf_efficient_attn.layout.cache import cached
from hf_efficient_attn.layout.dense.single_query import row_of
from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.patterns.counting import CrossingError, Moving
from hf_efficient_attn.patterns.pattern import Pattern
from hf_efficient_attn.patterns.work import SMALL_SHARE, bounded


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
    intervals = row_of(layout).common
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
        with bounded("Looking for a causal triangle", share=SMALL_SHARE):
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
