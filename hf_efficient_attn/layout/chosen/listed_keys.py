"""Keys that are listed for each query: tokens, or blocks of tokens."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from hf_efficient_attn.layout.chosen.chosen_keys import AXIS, DOCUMENT, ChosenKeys, States, in_range
from hf_efficient_attn.layout.chosen.few_queries import FEW_QUERIES
from hf_efficient_attn.layout.chosen.listed_tiles import block_tiles, tile_queries
from hf_efficient_attn.layout.chosen.tiles import Sizes, Tiles, TileWork
from hf_efficient_attn.layout.chosen.token_tiles import token_tiles, token_work
from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.layout.token_locations import token_locations
from hf_efficient_attn.layout.token_mask import TokenMask


@dataclass(frozen=True, eq=False)
class ChosenTokens(ChosenKeys):
    """The keys that each query reads, as far as the pattern and the masks allow them (DSA, arXiv:2512.02556).

    >>> import torch, hf_efficient_attn as hea
    >>> q, k, v = torch.randn(3, 1, 2, 4, 8)
    >>> tokens = torch.tensor([[[[0, -1], [0, 1], [1, 1], [0, 9]]]])
    >>> out = hea.attention(q, k, v, hea.patterns.Causal(), chosen=hea.ChosenTokens(tokens))
    >>> torch.allclose(out[:, :, 2], v[:, :, 1]) and torch.allclose(out[:, :, 3], v[:, :, 0])
    True

    Attributes:
        tokens: int [B or 1, heads, Nq, k], indices of keys; heads: 1 (all heads share the choice), the number of key
            heads, or that of query heads. -1 and numbers out of range are no key; a key named twice counts once.
    """

    tokens: Tensor
    kind: ClassVar[str] = "tokens"
    shares_masks: ClassVar[bool] = True
    tensor_names: ClassVar[tuple[str, ...]] = ("tokens",)

    def check(self, states: States) -> None:
        """Raise InputError for tensors or numbers that do not fit the call."""
        self.check_tensor("tokens", states, {"queries": states.num_queries, "keys": None})

    def of_query(self, query: int, position: int) -> ChosenKeys:
        """Return the choice of one query of the call, as that of a call with this query alone."""
        return replace(self, tokens=self.tokens[:, :, query : query + 1])

    def counts(
        self, layout: Layout, tokens: TokenMask, num_key_heads: int, query_start: Tensor | None = None
    ) -> Tensor:
        """Return 1 for every pair that is chosen, 0 for others."""
        return named_once(self.tokens, layout.num_keys)

    def tiles(self, layout: Layout, tokens: TokenMask, sizes: Sizes, only: Tensor | None = None) -> Iterator[Tiles]:
        """Yield tiles of queries and the tokens that they read."""
        return token_tiles(self.tokens, layout, sizes)

    def work(self, layout: Layout, sizes: Sizes) -> TileWork:
        """Return how much the tiles hold: neighbouring queries with all tokens that they read, about."""
        return token_work(self.tokens, layout, sizes)

    def has_single_rows(self, layout: Layout) -> bool:
        """Return True: a tile holds all keys of a query."""
        return True

    def most_pairs(self, layout: Layout, num_key_heads: int) -> int:
        """Return how many pairs can be chosen in all heads of one example."""
        return layout.num_rows * self.tokens.shape[3]


@dataclass(frozen=True, eq=False)
class ChosenBlocks(ChosenKeys):
    """The blocks of keys that each query, or each block of queries, reads (MoBA, arXiv:2502.13189; MiniMax-M3).

    Block b holds the keys b · block_tokens … (b + 1) · block_tokens - 1.

    Attributes:
        blocks: int [B or 1, heads, ceil(Nq / queries_per_choice), k], numbers of blocks; heads: 1 (all heads share the
            choice), the number of key heads, or that of query heads. -1 and numbers out of range are no block; a block
            named twice counts once.
        block_tokens: how many keys a block has.
        queries_per_choice: how many neighbouring queries of the call share each choice.
        counted_from: "document": blocks are counted from the first token of the query's document, so that padding and
            packing change nothing; "axis": from the first key of the call.
    """

    blocks: Tensor
    block_tokens: int
    queries_per_choice: int = 1
    counted_from: str = DOCUMENT
    kind: ClassVar[str] = "blocks"
    has_full_tiles: ClassVar[bool] = True
    are_blocks: ClassVar[bool] = True
    tensor_names: ClassVar[tuple[str, ...]] = ("blocks",)
    number_names: ClassVar[tuple[str, ...]] = ("block_tokens", "queries_per_choice", "counted_from")

    def check(self, states: States) -> None:
        """Raise InputError for tensors or numbers that do not fit the call."""
        self.check_count("block_tokens", 1)
        self.check_count("queries_per_choice", 1)
        self.check_word("counted_from", (DOCUMENT, AXIS))
        num_choices = -(-states.num_queries // self.queries_per_choice)
        self.check_tensor("blocks", states, {"choices": num_choices, "blocks": None})

    def of_query(self, query: int, position: int) -> ChosenKeys:
        """Return the choice of one query of the call, as that of a call with this query alone."""
        choice = query // self.queries_per_choice
        return replace(self, blocks=self.blocks[:, :, choice : choice + 1], queries_per_choice=1)

    def counts(
        self, layout: Layout, tokens: TokenMask, num_key_heads: int, query_start: Tensor | None = None
    ) -> Tensor:
        """Return 1 for every pair that is chosen, 0 for others."""
        num_blocks = -(-layout.num_keys // self.block_tokens)
        chosen = named_once(self.blocks, num_blocks)
        if self.queries_per_choice > 1:
            chosen = chosen.repeat_interleave(self.queries_per_choice, 2)[:, :, : layout.num_queries]
        places = self.key_places(layout, tokens)
        batch_size = max(chosen.shape[0], places.shape[0])
        own = (places // self.block_tokens)[:, None, None].expand(batch_size, *chosen.shape[1:3], -1)
        return chosen.expand(batch_size, -1, -1, -1).gather(3, own)

    def tiles(self, layout: Layout, tokens: TokenMask, sizes: Sizes, only: Tensor | None = None) -> Iterator[Tiles]:
        """Yield tiles of queries that read the same block."""
        starts = self.starts(layout, tokens)
        masks = () if self.counted_from == AXIS else tokens.tensors
        return block_tiles(self.blocks, starts, self.block_tokens, self.queries_per_choice, layout, sizes, masks)

    def work(self, layout: Layout, sizes: Sizes) -> TileWork:
        """Return how much the tiles hold, if blocks are read by equally many queries."""
        num_key_heads = sizes.num_key_heads
        reads = layout.num_rows * self.blocks.shape[3]
        if layout.num_queries <= FEW_QUERIES:
            num_sets = layout.num_queries * max(self.blocks.shape[1], num_key_heads)
            num_read = self.blocks.shape[3] * self.block_tokens
            return TileWork(reads * self.block_tokens, layout.num_rows, num_sets * num_read)
        group = layout.num_heads // max(self.blocks.shape[1], num_key_heads)
        num_blocks = -(-layout.num_keys // self.block_tokens)
        per_tile = tile_queries(reads // layout.num_heads * group // num_blocks)
        num_tiles = reads // per_tile + layout.num_heads // group * num_blocks
        return TileWork(reads * self.block_tokens, num_tiles * per_tile, num_tiles * self.block_tokens)

    def has_single_rows(self, layout: Layout) -> bool:
        """Return whether each query has a tile of its own."""
        return layout.num_queries <= FEW_QUERIES

    def starts(self, layout: Layout, tokens: TokenMask) -> Tensor:
        """Return the key from which the blocks of each query are counted, int [batch or 1, queries]."""
        device = self.blocks.device
        if self.counted_from == AXIS or (tokens.is_empty and not layout.is_cross):
            return torch.zeros(1, layout.num_queries, dtype=torch.long, device=device)
        positions = token_locations(tokens, layout.num_keys, device).positions
        starts = torch.arange(layout.num_keys, device=device) - positions
        if layout.is_cross:
            # all keys are one document, which begins with the first that is not masked
            return starts.amax(1, keepdim=True).expand(-1, layout.num_queries)
        return starts[:, layout.queries]

    def key_places(self, layout: Layout, tokens: TokenMask) -> Tensor:
        """Return the number of each key from which blocks are counted, int [batch or 1, keys]."""
        if self.counted_from == AXIS:
            return torch.arange(layout.num_keys, device=self.blocks.device)[None]
        return token_locations(tokens, layout.num_keys, self.blocks.device).positions


def named_once(numbers: Tensor, count: int) -> Tensor:
    """Return 1 for every number from 0 to count - 1 that is in a row, otherwise 0: int32 [..., count]."""
    named = torch.zeros(*numbers.shape[:-1], count + 1, dtype=torch.int32, device=numbers.device)
    return named.scatter(-1, in_range(numbers, count), 1)[..., :count]
