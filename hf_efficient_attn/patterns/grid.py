"""Grids: images, videos and tables; every axis has a pattern for the coordinates along it.

Ho et al., Axial Attention in Multidimensional Transformers (2019); Hassani et al., Neighborhood Attention Transformer
(2023).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from math import prod
from typing import Any, ClassVar

from hf_efficient_attn.errors import InputError
from hf_efficient_attn.patterns.bands import Band
from hf_efficient_attn.patterns.grid_axes import SHIFTED, Ranges, boxes, check_grid, crossed, shifted_axis, tile_orders
from hf_efficient_attn.patterns.intervals import Intervals, clip, intersect, normalize, union
from hf_efficient_attn.patterns.pattern import GlobalPosition, Pattern, TokenOrder
from hf_efficient_attn.patterns.serialization import MAX_INTEGER, check_length

# What grids have in common, whether or not all of their sizes are known.


@dataclass(frozen=True)
class AnyGrid(Pattern):
    """The base of grids: a pattern for each axis, and tokens before the grid; `Grid` documents the fields."""

    # whether the first size may be None, for as many rows as the input has
    may_follow: ClassVar[bool]

    shape: Sequence[int | None]
    axes: Sequence[Pattern]
    prefix_tokens: int = 0
    borders: str = "cut"
    is_causal: bool = False

    def __post_init__(self) -> None:
        shape, axes = check_grid(self, self.may_follow)
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "axes", axes)

    @property
    def parts(self) -> tuple[Pattern, ...]:
        return tuple(self.axes)

    def with_parts(self, parts: tuple[Pattern, ...]) -> Pattern:
        return replace(self, axes=parts)

    def causal(self) -> Pattern:
        return replace(self, is_causal=True)

    def global_positions(self) -> tuple[GlobalPosition, ...]:
        """Return none: the positions that its axes name are coordinates."""
        return ()

    def grid_shapes(self) -> tuple[tuple[int | None, ...], ...]:
        """Return only its own shape: a grid that is an axis consists of coordinates, not of tokens."""
        return (tuple(self.shape),)

    @property
    def granularity(self) -> int:
        return 1


def written_shape(shape: Sequence[int | None]) -> str:
    """Return the shape of a grid as messages show it.

    >>> written_shape([None, 28])
    'any number × 28'
    """
    return " × ".join("any number" if size is None else str(size) for size in shape)


# Grids whose sizes are all known.


@dataclass(frozen=True)
class SizedGrid(AnyGrid, kind="sized_grid"):
    """A `Grid` whose sizes are all known; tokens after it attend to, and are attended by, only its prefix tokens."""

    may_follow: ClassVar[bool] = False

    shape: Sequence[int]

    def resolve(self, num_keys: int, layer: int = 0, head: int = 0, num_heads: int = 1) -> Pattern:
        sizes = zip(self.axes, self.shape, strict=True)
        return self._with_changed(axis.resolve(size, layer, head, num_heads) for axis, size in sizes)

    def allowed(self, query: Any, key: Any) -> Any:
        of_query, of_key = (self._is_inside(position) for position in (query, key))
        reads = of_query & of_key
        # positions outside the grid are replaced by the first token, so that lookup tables have an entry for them
        query_token, key_token = (query - self.prefix_tokens) * of_query, (key - self.prefix_tokens) * of_key
        for axis, size in zip(reversed(self._moved_axes), reversed(self.shape), strict=True):
            reads = reads & axis.allowed(query_token % size, key_token % size)
            query_token, key_token = query_token // size, key_token // size
        if self.prefix_tokens > 0:
            reads = reads | (query < self.prefix_tokens) | (key < self.prefix_tokens)
        return reads & (key <= query) if self.is_causal else reads

    def key_intervals(self, first_query: int, last_query: int, num_keys: int) -> Intervals:
        prefix = self.prefix_tokens
        if first_query < prefix and not self.is_causal:
            return ((0, num_keys),)
        read = [(0, min(prefix, last_query + 1) if self.is_causal else prefix)]
        for box in self._boxes(first_query, last_query):
            for axes in self._products:
                read += self._crossed(
                    axis.key_intervals(*ends, size) for axis, ends, size in zip(axes, box, self.shape, strict=True)
                )
        return clip(normalize(read), num_keys)

    def full_key_intervals(self, first_query: int, last_query: int, num_keys: int) -> Intervals:
        prefix = self.prefix_tokens
        if first_query == last_query or (last_query < prefix and not self.is_causal):
            return self.key_intervals(first_query, last_query, num_keys)
        read: Intervals = ((0, min(prefix, first_query + 1) if self.is_causal else prefix),)
        if last_query < self.num_tokens and (first_query >= prefix or not self.is_causal):
            parts = [
                union(
                    *(
                        self._crossed(
                            axis.full_key_intervals(*ends, size)
                            for axis, ends, size in zip(axes, box, self.shape, strict=True)
                        )
                        for axes in self._products
                    )
                )
                for box in self._boxes(first_query, last_query)
            ]
            read = union(read, reduce(intersect, parts))
        return clip(normalize(read), num_keys)

    def num_pairs(self, num_queries: int, num_keys: int, query_offset: int = 0) -> int:
        stop, prefix = query_offset + num_queries, self.prefix_tokens
        if num_keys < (min(stop, self.num_tokens) if self.is_causal else self.num_tokens):
            return super().num_pairs(num_queries, num_keys, query_offset)
        of_prefix = range(query_offset, min(stop, prefix))
        total = sum(query + 1 for query in of_prefix) if self.is_causal else len(of_prefix) * num_keys
        total += (num_queries - len(of_prefix)) * prefix
        return total + sum(
            prod(
                axis.num_pairs(last - first + 1, size, first)
                for axis, (first, last), size in zip(axes, box, self.shape, strict=True)
            )
            for box in self._boxes(query_offset, stop - 1)
            for axes in self._products
        )

    @property
    def max_tokens_ahead(self) -> int | None:
        if self.is_causal:
            return 0
        if self.prefix_tokens > 0:
            return None
        limits = [axis.max_tokens_ahead for axis in self._moved_axes]
        coordinates = [
            size - 1 if limit is None else min(limit, size - 1) for limit, size in zip(limits, self.shape, strict=True)
        ]
        return sum(ahead * prod(self.shape[axis + 1 :]) for axis, ahead in enumerate(coordinates))

    def token_orders(self, num_queries: int, num_keys: int, query_offset: int = 0) -> tuple[TokenOrder, ...]:
        """Return orders of whole tiles of the grid; the tokens of a tile attend to nearly the same keys."""
        orders: tuple[TokenOrder, ...] | None = None
        if (query_offset, num_queries, num_keys) == (0, self.num_tokens, self.num_tokens):
            orders = tile_orders(tuple(self.shape), self._products, self.prefix_tokens, self.is_causal)
        return orders or super().token_orders(num_queries, num_keys, query_offset)

    def fitting_length(self, num_tokens: int) -> int:
        """Return `num_tokens`: every length is allowed."""
        return num_tokens

    @property
    def num_tokens(self) -> int:
        """The number of tokens up to the end of the grid, with the prefix tokens."""
        return self.prefix_tokens + prod(self.shape)

    @cached_property
    def _moved_axes(self) -> tuple[Pattern, ...]:
        """The patterns of the axes; with `borders="shifted"`, neighbourhoods move inwards at the borders."""
        if self.borders != SHIFTED:
            return tuple(self.axes)
        return tuple(map(shifted_axis, self.axes, self.shape))

    @cached_property
    def _products(self) -> tuple[tuple[Pattern, ...], ...]:
        """Products of axis patterns; the pattern of the grid is their union.

        A product, one pattern per axis, allows a pair if all of its patterns do. A causal grid has several products,
        because a key lies before its query if its coordinate is smaller on the first axis on which they differ.
        """
        axes = self._moved_axes
        if not self.is_causal:
            return (axes,)
        same, before = Band(0, 0), Band(None, -1)
        return tuple(
            (
                *(axis & same for axis in axes[:number]),
                *(axis & before for axis in axes[number : number + 1]),
                *axes[number + 1 :],
            )
            for number in range(len(axes) + 1)
        )

    def _is_inside(self, position: Any) -> Any:
        """Return whether a position lies in the grid."""
        return (position >= self.prefix_tokens) & (position < self.num_tokens)

    def _boxes(self, first_query: int, last_query: int) -> Iterator[Ranges]:
        """Yield the queries of a range that are tokens of the grid, as boxes."""
        first, last = max(first_query, self.prefix_tokens), min(last_query, self.num_tokens - 1)
        if first <= last:
            yield from boxes(first - self.prefix_tokens, last - self.prefix_tokens, self.shape)

    def _crossed(self, intervals: Iterable[Intervals]) -> Intervals:
        """Return the positions of the tokens whose coordinates lie in the intervals of every axis."""
        prefix = self.prefix_tokens
        return tuple((start + prefix, stop + prefix) for start, stop in crossed(tuple(intervals), self.shape))


@dataclass(frozen=True)
class Grid(AnyGrid, kind="grid"):
    """A token of a grid attends to another one if the pattern of every axis allows it for their coordinates.

    The tokens of the grid follow `prefix_tokens` other tokens, and the last coordinate runs fastest: images row by row,
    videos frame by frame. For neighbourhoods, give every axis a band. For axial attention, give one axis `Full()` and
    the others `Band(0, 0)`, which allows only the token's own coordinate. `attention` checks only the number of tokens
    of an input. Models of transformers also check its shape: for a grid of 28 × 28 they refuse 14 × 56 patches, and
    inputs where a masked autoencoder has removed some patches.

    shape: how many tokens lie along each axis; the first may be None, for as many rows or frames as the input has.
    axes: a pattern for each axis, whose positions are coordinates on it.
    prefix_tokens: tokens before the grid (a class token, registers). They attend to all tokens and are attended by all.
    borders: "cut": keys outside the grid are left out; "shifted": the neighbourhood moves inwards instead, so that all
        tokens attend to equally many keys (NATTEN).
    is_causal: no token attends to a later one, in the order of rows; the input may then end before the grid does.

    >>> from hf_efficient_attn.patterns.bands import Band
    >>> print(Grid([2, 3], [Band(1, 1), Band(0, 1)]).draw(6))
    ■■⬚■■⬚
    ⬚■■⬚■■
    ⬚⬚■⬚⬚■
    ■■⬚■■⬚
    ⬚■■⬚■■
    ⬚⬚■⬚⬚■

    Raises:
        ConfigurationError: an axis without a size or a pattern, a pattern whose keys are not coordinates, or one that
            cannot be shifted.
    """

    may_follow: ClassVar[bool] = True

    @property
    def depends_on_length(self) -> bool:
        if not self.is_causal or super().depends_on_length:
            # the grid has to fit each input
            return True
        return self.shape[0] is None and self.borders == SHIFTED

    def resolve(self, num_keys: int, layer: int = 0, head: int = 0, num_heads: int = 1) -> Pattern:
        """Return the grid of an input.

        Raises:
            InputError: the input has more or fewer tokens than the grid.
        """
        check_length("num_keys", num_keys)
        return self._sized(self._shape_of(num_keys)).resolve(num_keys, layer, head, num_heads)

    def allowed(self, query: Any, key: Any) -> Any:
        if self.depends_on_length:
            self._needs_length()
        # which keys a causal query attends to does not depend on the number of rows that follow
        rows = self.shape[0] or (MAX_INTEGER - self.prefix_tokens) // prod(self._inner_shape)
        return self._sized((rows, *self._inner_shape)).allowed(query, key)

    @property
    def _inner_shape(self) -> tuple[int, ...]:
        """The sizes of all axes but the first."""
        return tuple(size for size in self.shape[1:] if size is not None)

    def fitting_length(self, num_tokens: int) -> int:
        """Return the number of tokens of a grid with about as many rows as fit into this length."""
        row_tokens = prod(self._inner_shape)
        num_rows = self.shape[0] or max(1, (num_tokens - self.prefix_tokens) // row_tokens)
        num_all = self.prefix_tokens + num_rows * row_tokens
        return min(num_tokens, num_all) if self.is_causal else num_all

    def _sized(self, shape: tuple[int, ...]) -> SizedGrid:
        return SizedGrid(shape, self.axes, self.prefix_tokens, self.borders, self.is_causal)

    def _shape_of(self, num_tokens: int) -> tuple[int, ...]:
        """Return the sizes of the axes for an input of this length, or refuse it."""
        row_tokens, num_own = prod(self._inner_shape), num_tokens - self.prefix_tokens
        num_rows = self.shape[0] or max(1, -(-num_own // row_tokens))
        num_grid = num_rows * row_tokens
        if num_own == num_grid or (self.is_causal and num_own < num_grid):
            return (num_rows, *self._inner_shape)
        needed = (
            f"{self.prefix_tokens} + a multiple of {row_tokens}"
            if self.shape[0] is None
            else self.prefix_tokens + num_grid
        )
        raise InputError(
            f"{self.kind}: the input has {num_tokens} tokens, but {self.prefix_tokens} prefix tokens and a grid of "
            f"{written_shape(self.shape)} {'allow at most' if self.is_causal else 'need'} {needed} tokens. Give inputs "
            "of this size (for images, the grid counts patches; masked tokens at either end do not count), or change "
            "the shape or prefix_tokens of the grid."
        )
