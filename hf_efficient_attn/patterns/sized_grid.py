"""Grids whose sizes are all known: what their tokens read, and the tiles in which they are computed."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from math import prod
from typing import Any, ClassVar

from hf_efficient_attn.patterns.bands import Band
from hf_efficient_attn.patterns.grid_axes import SHIFTED, Ranges, boxes, crossed, shifted_axis
from hf_efficient_attn.patterns.grid_base import AnyGrid
from hf_efficient_attn.patterns.grid_tiles import tile_orders
from hf_efficient_attn.patterns.intervals import Intervals, clip, intersect, normalize, union
from hf_efficient_attn.patterns.pattern import Pattern
from hf_efficient_attn.patterns.token_order import TokenOrder


@dataclass(frozen=True)
class SizedGrid(AnyGrid, kind="sized_grid"):
    """A `Grid` whose sizes are all known; tokens beyond it read, and are read by, its prefix tokens only."""

    may_follow: ClassVar[bool] = False

    shape: Sequence[int]

    def resolve(self, num_keys: int, layer: int = 0, head: int = 0, num_heads: int = 1) -> Pattern:
        sizes = zip(self.axes, self.shape, strict=True)
        return self._with_changed(axis.resolve(size, layer, head, num_heads) for axis, size in sizes)

    def allowed(self, query: Any, key: Any) -> Any:
        of_query, of_key = (self._is_inside(position) for position in (query, key))
        reads = of_query & of_key
        # positions outside are those of the first token, so that tables can look them up
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
        """Return orders of whole tiles of the grid, whose tokens read nearly the same keys."""
        orders: tuple[TokenOrder, ...] | None = None
        if (query_offset, num_queries, num_keys) == (0, self.num_tokens, self.num_tokens):
            orders = tile_orders(tuple(self.shape), self._products, self.prefix_tokens, self.is_causal)
        return orders or super().token_orders(num_queries, num_keys, query_offset)

    def fitting_length(self, num_tokens: int) -> int:
        """Return the same: it is for inputs of any length."""
        return num_tokens

    @property
    def num_tokens(self) -> int:
        """How many tokens there are up to the end of the grid."""
        return self.prefix_tokens + prod(self.shape)

    @cached_property
    def _moved_axes(self) -> tuple[Pattern, ...]:
        """The patterns of the axes, shifted inwards at the borders where that is asked for."""
        if self.borders != SHIFTED:
            return tuple(self.axes)
        return tuple(map(shifted_axis, self.axes, self.shape))

    @cached_property
    def _products(self) -> tuple[tuple[Pattern, ...], ...]:
        """Patterns of the axes; what is read are the keys that all patterns of one entry let a token read.

        A key lies before its query if it does so on the first axis on which they differ.
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
        """Return whether a token is one of the grid."""
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
