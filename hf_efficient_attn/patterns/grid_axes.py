"""The axes of a grid: what they may be, the ranges of coordinates of neighbouring tokens, and borders that shift."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.messages import shown
from hf_efficient_attn.patterns.bands import Distances
from hf_efficient_attn.patterns.checks import MAX_INTEGER, check_bool, check_choice, check_integer, is_integer, plain
from hf_efficient_attn.patterns.intervals import Intervals, clip, normalize
from hf_efficient_attn.patterns.part_checks import check_patterns
from hf_efficient_attn.patterns.pattern import Pattern
from hf_efficient_attn.patterns.token_order import TokenOrder

CUT, SHIFTED = "cut", "shifted"
# so many axes are plenty for tables, images and videos
MAX_AXES = 8


def check_grid(grid: Any, may_follow: bool) -> tuple[tuple[int | None, ...], tuple[Pattern, ...]]:
    """Return shape and axes of a grid as tuples.

    Args:
        may_follow: whether the first size may be None, for as many rows as a text has.

    Raises:
        ConfigurationError: values that no grid has.
    """
    kind, shape = grid.kind, plain(grid.shape)
    listed = tuple(shape) if isinstance(shape, list | tuple) else ()
    if not 0 < len(listed) <= MAX_AXES or not all(
        _is_size(size, may_follow and not i) for i, size in enumerate(listed)
    ):
        first = ", of which the first may be None for as many as there are" if may_follow else ""
        raise ConfigurationError(
            f"{kind}: shape is {shown(grid.shape)}; give how many tokens lie along each axis, 1 to {MAX_AXES} integers "
            f"of at least 1{first}, such as [56, 56]."
        )
    check_integer(kind, "prefix_tokens", grid.prefix_tokens, at_least=0)
    if grid.prefix_tokens + prod(size or 1 for size in listed) > MAX_INTEGER:
        raise ConfigurationError(f"{kind}: shape is {shown(grid.shape)}, which are more than {MAX_INTEGER} tokens.")
    check_choice(kind, "borders", grid.borders, (CUT, SHIFTED))
    check_bool(kind, "is_causal", grid.is_causal)
    axes = check_patterns(kind, grid.axes)
    if len(axes) != len(listed):
        raise ConfigurationError(
            f"{kind}: shape has {len(listed)} axes and axes has {len(axes)} patterns; give one pattern for each axis, "
            "such as Full() for an axis along which everything is read, and Band(0, 0) for one along which nothing is."
        )
    for number, axis in enumerate(axes):
        if axis.needs_two_axes:
            raise ConfigurationError(
                f"{kind}: axes[{number}] is {shown(axis)}, whose keys are not the coordinates of tokens. Give a "
                "pattern of one sequence, such as Band(3, 3)."
            )
        if grid.borders == SHIFTED and not _can_shift(axis):
            raise ConfigurationError(
                f"{kind}: axes[{number}] is {shown(axis)}, which cannot be shifted inwards at the borders. Give Band "
                "or Dilated with two limits of at least 0, or Full; or borders='cut'."
            )
    return listed, axes


def _is_size(size: Any, may_be_none: bool) -> bool:
    return (size is None and may_be_none) or (is_integer(size) and 1 <= size <= MAX_INTEGER)


def _can_shift(axis: Pattern) -> bool:
    listed = axis.heads(axis.num_head_patterns)
    return all(each.band_limits == (None, None) or _has_limits(each) for each in listed)


def _has_limits(axis: Pattern) -> bool:
    return isinstance(axis, Distances) and all(limit is not None and limit >= 0 for limit in (axis.left, axis.right))


def shifted_axis(axis: Pattern, size: int) -> Pattern:
    """Return the pattern of an axis of a known size whose borders shift what is read; itself where nothing is cut."""
    if isinstance(axis, Distances) and axis.left is not None and axis.right is not None:
        return ShiftedBand(axis.left // axis.step, axis.right // axis.step, axis.step, size)
    return axis


@dataclass(frozen=True)
class ShiftedBand(Pattern):
    """Every query reads equally many keys: at the ends of the axis those that are nearest to where they would lie.

    left, right: how many keys before and after the query, away from the ends.
    step: from key to key; the query reads keys of its own residue class.
    size: of the axis; all keys of a class are read where they are too few.
    """

    # it is a part of patterns, but no config holds it
    kind: ClassVar[str] = "shifted_band"

    left: int
    right: int
    step: int
    size: int

    def allowed(self, query: Any, key: Any) -> Any:
        start = self._first_place(query)
        place = key // self.step
        reads = (place >= start) & (place <= start + self.left + self.right)
        return reads if self.step == 1 else reads & ((key - query) % self.step == 0)

    def key_intervals(self, first_query: int, last_query: int, num_keys: int) -> Intervals:
        if self.step == 1:
            # neighbours start to read at the same key, or one after another
            stop = self._first_place(last_query) + self.left + self.right + 1
            return clip([(self._first_place(first_query), stop)], min(num_keys, self.size))
        keys = (
            query % self.step + self.step * (self._first_place(query) + place)
            for query in range(first_query, last_query + 1)
            for place in range(self.left + self.right + 1)
        )
        return clip(normalize((key, key + 1) for key in keys), min(num_keys, self.size))

    def full_key_intervals(self, first_query: int, last_query: int, num_keys: int) -> Intervals:
        if self.step > 1 or first_query == last_query:
            return super().full_key_intervals(first_query, last_query, num_keys)
        stop = self._first_place(first_query) + self.left + self.right + 1
        return clip([(self._first_place(last_query), stop)], min(num_keys, self.size))

    def token_orders(self, num_queries: int, num_keys: int, query_offset: int = 0) -> tuple[TokenOrder, ...]:
        """Return one order per residue class, within which nothing else is read."""
        if self.step == 1 or (query_offset, num_queries, num_keys) != (0, self.size, self.size):
            return super().token_orders(num_queries, num_keys, query_offset)
        classes = (range(first, self.size, self.step) for first in range(min(self.step, self.size)))
        return tuple(TokenOrder(own, own, None) for own in classes)

    def _first_place(self, query: Any) -> Any:
        """Return the place of the first key that a query reads among those of its class."""
        last = (self.size - 1 - query % self.step) // self.step
        start = query // self.step - self.left
        beyond = start + self.left + self.right - last
        start = start - beyond * (beyond > 0)
        return start * (start > 0)


Ranges = tuple[tuple[int, int], ...]


def boxes(first: int, last: int, shape: Sequence[int]) -> Iterator[Ranges]:
    """Yield the tokens first … last of a grid as boxes: the first and last coordinate on every axis.

    >>> list(boxes(1, 7, (3, 3)))
    [((0, 0), (1, 2)), ((2, 2), (0, 1)), ((1, 1), (0, 2))]
    """
    if len(shape) == 1:
        yield ((first, last),)
        return
    row_tokens = prod(shape[1:])
    (top, start), (bottom, stop) = divmod(first, row_tokens), divmod(last, row_tokens)
    if top == bottom:
        yield from (((top, top), *rest) for rest in boxes(start, stop, shape[1:]))
        return
    if start > 0:
        yield from (((top, top), *rest) for rest in boxes(start, row_tokens - 1, shape[1:]))
        top += 1
    if stop < row_tokens - 1:
        yield from (((bottom, bottom), *rest) for rest in boxes(0, stop, shape[1:]))
        bottom -= 1
    if top <= bottom:
        yield ((top, bottom), *((0, size - 1) for size in shape[1:]))


def crossed(intervals: Sequence[Intervals], shape: Sequence[int]) -> Intervals:
    """Return the tokens of a grid whose coordinates lie in the intervals of every axis.

    >>> crossed([((0, 2),), ((1, 3),)], (3, 4))
    ((1, 3), (5, 7))
    """
    tokens: Intervals = ((0, 1),)
    num_inner = 1
    for of_axis, size in zip(reversed(intervals), reversed(shape), strict=True):
        if tokens == ((0, num_inner),):
            tokens = tuple((start * num_inner, stop * num_inner) for start, stop in of_axis)
        else:
            tokens = normalize(
                (coordinate * num_inner + start, coordinate * num_inner + stop)
                for interval in of_axis
                for coordinate in range(*interval)
                for start, stop in tokens
            )
        num_inner *= size
    return tokens
