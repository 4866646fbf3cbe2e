"""Chunks of an order of tokens: sorted into it, queries read whole chunks of neighbouring places, as chosen blocks.

A token stands at several places, one in every round; what it reads at each of them is joined by its log-sum-exp.
"""

from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import dropout as drop
from torch.nn.functional import pad

from hf_efficient_attn.backends.flex.blocks import BLOCK_SIZES
from hf_efficient_attn.backends.flex.captured import captured, kind_of
from hf_efficient_attn.backends.flex.chosen_blocks import BlockChoice, choice_of, chosen_blocks, lists_of_blocks
from hf_efficient_attn.backends.flex.mods import Mods, mods_of
from hf_efficient_attn.layout.call import AttentionCall
from hf_efficient_attn.layout.chosen.chosen_keys import AXIS, in_range, of_heads
from hf_efficient_attn.layout.chosen.dense_groups import joined_shares
from hf_efficient_attn.layout.chosen.grouped_keys import ChunkedOrder
from hf_efficient_attn.layout.chosen.listed_keys import ChosenBlocks
from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.layout.token_mask import NO_MASK
from hf_efficient_attn.patterns.bands import Full

# which pairs of a token with itself a kernel computes
AS_ALL, NEVER, ONLY = "as all", "never", "only"


@dataclass(frozen=True, eq=False)
class OrderedPlaces:
    """What stands at the places of an order, one row of places for each head.

    Attributes:
        call: whose keys are chosen by a `ChunkedOrder`.
        rows, keys: the query of the call, and the key, int64 [batch, heads, places]; their number: none.
        buckets: of the shape of these; only pairs of equal buckets are read. None: all pairs.
        reads: the chunks that the queries of a chunk read.
        tables: of the BlockMask of pairs of places.
    """

    call: AttentionCall
    rows: Tensor
    keys: Tensor
    buckets: Tensor | None
    reads: BlockChoice
    tables: tuple[Tensor, ...]

    def of_queries(self, q: Tensor) -> Tensor:
        """Return the queries [B, H, Nq, D] at all places, [B, H, places, D]."""
        return _at(q, self.rows)

    def of_keys(self, k: Tensor) -> Tensor:
        """Return keys or values [B, Hkv, Nk, D] at the places of every head, [B, H, places, D]."""
        return _at(k.repeat_interleave(self.call.layout.num_heads // k.shape[1], 1), self.keys)

    def kernel(self, self_pairs: str) -> tuple[Mods, BlockMask]:
        """Return the functions of a kernel, and the blocks that it visits."""
        mods, lengths = self._mods(self_pairs), (self.rows.shape[2],) * 2
        mask = BlockMask(lengths, *self.tables, BLOCK_SIZES[self.rows.device.type], mods.mask_mod)  # type: ignore[arg-type, call-arg]
        return mods, mask

    def joined(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Return output and log-sum-exp of the queries from those of their places."""
        num_rows = self.call.layout.num_queries + 1
        total, shares = joined_shares(lse, self.rows, num_rows)
        index = self.rows[..., None].expand(-1, -1, -1, out.shape[3])
        sums = lse.new_zeros(*lse.shape[:2], num_rows, out.shape[3])
        sums = sums.scatter_add(2, index, out * shares[..., None])
        return sums[:, :, :-1].to(out.dtype), total[..., :-1]

    def with_self(self, out: Tensor, lse: Tensor, v: Tensor, lse_of_self: Tensor) -> tuple[Tensor, Tensor]:
        """Return output and log-sum-exp in which queries that read no other key read themselves.

        lse_of_self: of the pairs of the queries with themselves, at all places.
        """
        layout = self.call.layout
        own = v[:, :, layout.queries].repeat_interleave(layout.num_heads // v.shape[1], 1)
        total = joined_shares(lse_of_self, self.rows, layout.num_queries + 1)[0][..., :-1]
        is_alone = (lse == -torch.inf) & (total > -torch.inf)
        kept = drop(torch.ones_like(total), self.call.dropout)[..., None].to(own.dtype)
        return torch.where(is_alone[..., None], own * kept, out), torch.where(is_alone, total, lse)

    def _mods(self, self_pairs: str) -> Mods:
        """Return the functions of a kernel for pairs of places; those of the call are asked about their tokens."""
        layout, reads = self.call.layout, self.reads
        base = mods_of(replace(self.call, chosen=None), self.rows.device)
        # negative numbers of none, so that a kernel serves all lengths
        rows, keys = (
            captured(torch.where(each < count, each, -1).to(torch.int32), (0, 2))
            for each, count in ((self.rows, layout.num_queries), (self.keys, layout.num_keys))
        )
        buckets = None if self.buckets is None else captured(self.buckets, (0, 2))
        # a chunk may be listed twice
        counts_lists = cast(ChunkedOrder, self.call.chosen).reads is not None

        def tokens(example: Tensor, head: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
            return rows[example, head, query].clamp(min=0), keys[example, head, key].clamp(min=0)

        def mask_mod(example: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            own, read = keys[example, head, query], keys[example, head, key]
            allowed = (rows[example, head, query] >= 0) & (read >= 0) & reads.holds(example, head, query, key)
            if buckets is not None:
                allowed = allowed & (buckets[example, head, query] == buckets[example, head, key])
            if self_pairs != AS_ALL:
                allowed = allowed & ((own == read) == (self_pairs == ONLY))
            return allowed & base.mask_mod(example, head, *tokens(example, head, query, key))

        def score_mod(score: Tensor, example: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            if base.score_mod is not None:
                score = base.score_mod(score, example, head, *tokens(example, head, query, key))
            if counts_lists:
                score = score + reads.count(example, head, query, key).clamp(min=1).to(torch.float32).log()
            return score

        has_scores = base.score_mod is not None or counts_lists
        kind = (counts_lists, self_pairs, kind_of(rows), None if buckets is None else kind_of(buckets))
        return Mods(mask_mod, score_mod if has_scores else None, (base.kind, reads.kind, kind))


def ordered_places(call: AttentionCall, device: torch.device) -> OrderedPlaces:
    """Return the places of a call with a `ChunkedOrder`."""
    chosen, layout = cast(ChunkedOrder, call.chosen), call.layout
    order = chosen.chunks(chosen.order.long())
    shape = (call.inputs.batch_size, layout.num_heads, -1)
    places = of_heads(order.flatten(2), layout.num_heads).expand(shape)
    buckets = None
    if chosen.buckets is not None:
        buckets = of_heads(chosen.chunks(chosen.buckets.long()).flatten(2), layout.num_heads).expand(shape)
    reads, in_order = blocks_of_places(chosen, layout, device)
    touched, _ = chosen_blocks(reads, in_order, NO_MASK, BLOCK_SIZES[device.type])
    blocks = of_heads(touched, layout.num_heads)
    return OrderedPlaces(
        call,
        rows=in_range(places - layout.query_offset, layout.num_queries),
        keys=in_range(places, layout.num_keys),
        buckets=buckets,
        reads=choice_of(replace(call, chosen=reads, layout=in_order)),
        tables=lists_of_blocks(blocks, torch.zeros_like(blocks), needs_grad=True),
    )


def blocks_of_places(chosen: ChunkedOrder, layout: Layout, device: torch.device) -> tuple[ChosenBlocks, Layout]:
    """Return what the chunks of an order read as blocks of places, and the layout of all pairs of places."""
    num_chunks, size = chosen.num_chunks, chosen.chunk_tokens
    reads = chosen.reads
    if reads is None:
        before, after = chosen.neighbours(num_chunks)
        steps = torch.arange(-before, after + 1, device=device)
        reads = (torch.arange(num_chunks, device=device)[:, None] + steps)[None, None] % max(1, num_chunks)
    num_places = num_chunks * size
    in_order = replace(layout, pattern=Full(), num_queries=num_places, num_keys=num_places, query_offset=0)
    return ChosenBlocks(reads, size, size, AXIS), in_order


def _at(tensor: Tensor, index: Tensor) -> Tensor:
    """Return the tokens of a tensor [B, H, tokens, D] at [B, H, places]; none is 0."""
    return pad(tensor, (0, 0, 0, 1)).gather(2, index[..., None].expand(-1, -1, -1, tensor.shape[3]))
