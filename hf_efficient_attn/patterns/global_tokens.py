"""Global tokens: they attend to all tokens, and all tokens attend to them."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.patterns.intervals import Intervals, clip, normalize, size
from hf_efficient_attn.patterns.pattern import DecodingReach, GlobalPosition, Pattern, TokenOrder
from hf_efficient_attn.patterns.serialization import check_bool, integers

# from this length on, neighbours are computed in place instead of being gathered
LONG_INTERVAL = 1024


@dataclass(frozen=True)
class GlobalTokens(Pattern, kind="global_tokens"):
    """The tokens at `positions` attend to all keys and are attended by all queries (Longformer, section 3.1).

    All other tokens attend only to these tokens, not even to themselves, so join this pattern with a band. Positions
    beyond the end of an input are ignored, because one pattern is used for inputs of any length.

    positions: integers; negative positions count from the end.
    attends_to_all, attended_by_all: whether these tokens attend to all keys, and whether all queries attend to them; at
        most one of the two may be False.

    >>> print(GlobalTokens([0]).draw(3))
    ■■■
    ■⬚⬚
    ■⬚⬚

    Raises:
        ConfigurationError: positions that are not integers, or both halves left out.
    """

    positions: Sequence[int]
    attends_to_all: bool = True
    attended_by_all: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "positions", integers(self.kind, "positions", self.positions))
        check_bool(self.kind, "attends_to_all", self.attends_to_all)
        check_bool(self.kind, "attended_by_all", self.attended_by_all)
        if not (self.attends_to_all or self.attended_by_all):
            raise ConfigurationError(
                f"{self.kind}: attends_to_all and attended_by_all are both false; set at least one of them to true."
            )

    @property
    def depends_on_length(self) -> bool:
        # positions are sorted
        return len(self.positions) > 0 and self.positions[0] < 0

    def resolve(self, num_keys: int, layer: int = 0, head: int = 0, num_heads: int = 1) -> Pattern:
        counted = (position + num_keys if position < 0 else position for position in self.positions)
        kept = tuple(sorted({position for position in counted if 0 <= position < num_keys}))
        return self if kept == self.positions else replace(self, positions=kept)

    def allowed(self, query: Any, key: Any) -> Any:
        reading = _inside(self._intervals if self.attends_to_all else (), query)
        return reading | _inside(self._intervals if self.attended_by_all else (), key)

    def key_intervals(self, first_query: int, last_query: int, num_keys: int) -> Intervals:
        if self.attends_to_all and self._num_positions(first_query, last_query):
            return ((0, num_keys),)
        return self._read_intervals(num_keys)

    def full_key_intervals(self, first_query: int, last_query: int, num_keys: int) -> Intervals:
        if self.attends_to_all and self._num_positions(first_query, last_query) == last_query - first_query + 1:
            return ((0, num_keys),)
        return self._read_intervals(num_keys)

    def num_pairs(self, num_queries: int, num_keys: int, query_offset: int = 0) -> int:
        num_rows = self._num_positions(query_offset, query_offset + num_queries - 1) if self.attends_to_all else 0
        return num_rows * num_keys + (num_queries - num_rows) * size(self._read_intervals(num_keys))

    @property
    def max_tokens_ahead(self) -> int | None:
        if self.attends_to_all or self.depends_on_length:
            return None
        return max(self.positions, default=-1)

    def members(self) -> tuple[Pattern, ...]:
        """Return the columns and the rows, which are computed separately."""
        if not (self.attends_to_all and self.attended_by_all):
            return (self,)
        return replace(self, attends_to_all=False), replace(self, attended_by_all=False)

    def decoding_reach(self) -> DecodingReach | None:
        num_first = len(self.positions)
        return DecodingReach(num_first, 0) if tuple(self.positions) == tuple(range(num_first)) else None

    def global_positions(self) -> tuple[GlobalPosition, ...]:
        return tuple(GlobalPosition(position, 1) for position in self.positions)

    def token_orders(self, num_queries: int, num_keys: int, query_offset: int = 0) -> tuple[TokenOrder, ...]:
        """Return the columns (all queries, global keys) and the rows (global queries, all keys), if not empty.

        If all positions form long intervals of neighbours, return the order of the tokens instead.
        """
        positions = self._counted_from_start
        if all(stop - start >= LONG_INTERVAL for start, stop in self._intervals):
            return super().token_orders(num_queries, num_keys, query_offset)
        queries = range(query_offset, query_offset + num_queries)
        rows = tuple(position for position in positions if self.attends_to_all and position in queries)
        columns = tuple(position for position in positions if self.attended_by_all and position < num_keys)
        orders = (TokenOrder(queries, columns, None), TokenOrder(rows, range(num_keys), None))
        return tuple(order for order in orders if order.queries and order.keys)

    @cached_property
    def _intervals(self) -> Intervals:
        return normalize((position, position + 1) for position in self._counted_from_start)

    @property
    def _counted_from_start(self) -> Sequence[int]:
        if self.depends_on_length:
            self._needs_length()
        return self.positions

    def _read_intervals(self, num_keys: int) -> Intervals:
        return clip(self._intervals, num_keys) if self.attended_by_all else ()

    def _num_positions(self, first: int, last: int) -> int:
        positions = self._counted_from_start
        return bisect_left(positions, last + 1) - bisect_left(positions, first)


def _inside(intervals: Intervals, position: Any) -> Any:
    inside = position < 0
    for start, stop in intervals:
        inside = inside | ((position >= start) & (position < stop))
    return inside
