"""Patterns of blocks of tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any

from hf_efficient_attn.patterns.algebra import check_pattern
from hf_efficient_attn.patterns.bands import Band
from hf_efficient_attn.patterns.intervals import Intervals, clip, counting
from hf_efficient_attn.patterns.pattern import GlobalPosition, Pattern, TokenOrder
from hf_efficient_attn.patterns.serialization import check_integer


class OfBlocks(Pattern):
    """The base of patterns of blocks: a query attends to all keys of the blocks that `pattern` allows for its block."""

    pattern: Pattern
    block_tokens: int

    def __post_init__(self) -> None:
        check_pattern(self.kind, self.pattern)
        check_integer(self.kind, "block_tokens", self.block_tokens, at_least=1)

    @property
    def parts(self) -> tuple[Pattern, ...]:
        return (self.pattern,)

    def with_parts(self, parts: tuple[Pattern, ...]) -> Pattern:
        return Blocks(parts[0], self.block_tokens)

    def allowed(self, query: Any, key: Any) -> Any:
        return self.pattern.allowed(query // self.block_tokens, key // self.block_tokens)

    def composed(self, of: Callable[[Pattern, Any, Any], Any], query: Any, key: Any) -> Any:
        return of(self.pattern, query // self.block_tokens, key // self.block_tokens)

    def key_intervals(self, first_query: int, last_query: int, num_keys: int) -> Intervals:
        return self._clip(self.pattern.key_intervals(*self._blocks(first_query, last_query, num_keys)), num_keys)

    def full_key_intervals(self, first_query: int, last_query: int, num_keys: int) -> Intervals:
        return self._clip(self.pattern.full_key_intervals(*self._blocks(first_query, last_query, num_keys)), num_keys)

    def num_pairs(self, num_queries: int, num_keys: int, query_offset: int = 0) -> int:
        # all queries of a block attend to the same keys
        stop = query_offset + num_queries
        second_block = (query_offset // self.block_tokens + 1) * self.block_tokens
        edges = chain([query_offset], range(second_block, stop, self.block_tokens), [stop])
        with counting(self):
            return sum((after - first) * self.num_keys_of(first, num_keys) for first, after in pairwise(edges))

    @property
    def period(self) -> int | None:
        return None if self.pattern.period is None else self.pattern.period * self.block_tokens

    @property
    def max_tokens_ahead(self) -> int | None:
        limit = self.pattern.max_tokens_ahead
        return None if limit is None else (limit + 1) * self.block_tokens - 1

    @property
    def granularity(self) -> int:
        return self.pattern.granularity * self.block_tokens

    @property
    def is_made_of_blocks(self) -> bool:
        return self.pattern.granularity == 1 or self.pattern.is_made_of_blocks

    def resolve(self, num_keys: int, layer: int = 0, head: int = 0, num_heads: int = 1) -> Pattern:
        return super().resolve(self._num_blocks(num_keys), layer, head, num_heads)

    def members(self) -> tuple[Pattern, ...]:
        return tuple(self._with_changed((member,)) for member in self.pattern.members())

    def subsample(self, step: int) -> Pattern | None:
        if self.block_tokens % step:
            return None
        return replace(self, block_tokens=self.block_tokens // step)  # type: ignore[type-var]

    def token_orders(self, num_queries: int, num_keys: int, query_offset: int = 0) -> tuple[TokenOrder, ...]:
        """Return the orders of the blocks' pattern, with each block replaced by its tokens."""
        first, last, num_blocks = self._blocks(query_offset, query_offset + num_queries - 1, num_keys)
        return tuple(
            self._expand(order, range(query_offset, query_offset + num_queries), range(num_keys))
            for order in self.pattern.token_orders(last - first + 1, num_blocks, first)
        )

    def fitting_length(self, num_tokens: int) -> int:
        num_blocks = self._num_blocks(num_tokens)
        fitting = self.pattern.fitting_length(num_blocks)
        return num_tokens if fitting == num_blocks else fitting * self.block_tokens

    def global_positions(self) -> tuple[GlobalPosition, ...]:
        return tuple(
            found._replace(block_tokens=found.block_tokens * self.block_tokens) for found in super().global_positions()
        )

    def grid_shapes(self) -> tuple[tuple[int | None, ...], ...]:
        """Return none: a grid in its pattern consists of blocks, not of tokens."""
        return ()

    def _expand(self, order: TokenOrder, queries: range, keys: range) -> TokenOrder:
        # only the very first block can lack tokens at its start, and it is the first block of its order
        lost = max(0, queries.start - order.queries[0] * self.block_tokens)
        return TokenOrder(
            queries=self._tokens_of(order.queries, queries),
            keys=self._tokens_of(order.keys, keys),
            local=None if order.local is None else self._with_changed((order.local,)),
            local_query_offset=order.local_query_offset * self.block_tokens + lost,
        )

    def _tokens_of(self, blocks: Sequence[int], tokens: range) -> Sequence[int]:
        size = self.block_tokens
        if isinstance(blocks, range) and blocks.step == 1:
            return range(max(blocks.start * size, tokens.start), min(blocks.stop * size, tokens.stop))
        return tuple(
            token
            for block in blocks
            for token in range(max(block * size, tokens.start), min((block + 1) * size, tokens.stop))
        )

    def _clip(self, intervals: Intervals, num_keys: int) -> Intervals:
        return clip(((start * self.block_tokens, stop * self.block_tokens) for start, stop in intervals), num_keys)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)

    def _blocks(self, first_query: int, last_query: int, num_keys: int) -> tuple[int, int, int]:
        return first_query // self.block_tokens, last_query // self.block_tokens, self._num_blocks(num_keys)


@dataclass(frozen=True)
class Blocks(OfBlocks, kind="blocks"):
    """A pattern of blocks: a query attends to all keys of the blocks that `pattern` allows for the query's block.

    pattern: a pattern whose positions count blocks.
    block_tokens: tokens per block; the last block may be shorter.

    Raises:
        ConfigurationError: no pattern, or blocks of less than one token.
    """

    pattern: Pattern
    block_tokens: int


@dataclass(frozen=True)
class BlockLocal(OfBlocks, kind="block_local"):
    """Every query attends to the keys of its own block (Lin et al., A Survey of Transformers, section 4.1.1).

    block_tokens: tokens per block; the last block may be shorter.

    >>> print(BlockLocal(2).draw(5))
    ■■⬚⬚⬚
    ■■⬚⬚⬚
    ⬚⬚■■⬚
    ⬚⬚■■⬚
    ⬚⬚⬚⬚■

    Raises:
        ConfigurationError: blocks of less than one token.
    """

    block_tokens: int
    pattern = Band(left=0, right=0)
