"""Rows of global tokens, with projections of their own, of texts that several processes share."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.attention.sharded.dealt_heads import deal_heads
from hf_efficient_attn.attention.sharded.sequence_shards import SequenceShards, shard_bounds
from hf_efficient_attn.attention.sharded.sums import SumOfProcesses
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.models.global_tokens.projections import GlobalAttention
from hf_efficient_attn.models.global_tokens.rows import GlobalRows
from hf_efficient_attn.models.parts.positions import rotate


def read_together(
    attention: GlobalAttention,
    hidden_states: Tensor,
    rows: GlobalRows,
    rotation: tuple[Tensor, Tensor] | None,
    shards: SequenceShards,
) -> tuple[Tensor, GlobalRows]:
    """Return what the global tokens of whole texts read, [B, X, H, D], and which of them are this process's.

    All processes get the hidden states of the global tokens, which are few, and each the keys of all tokens for some
    heads.

    Args:
        hidden_states: of this process's tokens, [B, n, hidden_size].
        rows: of the whole texts.
        rotation: cosines and sines of this process's tokens, [B or 1, n, D].
    """
    num_tokens = rows.is_row.shape[1]
    first, stop = shard_bounds(num_tokens, shards.size)[shards.rank]
    is_own = rows.is_global & (rows.index >= first) & (rows.index < stop)
    index = (rows.index - first).clamp(0, stop - first - 1)

    def of_all(states: Tensor) -> Tensor:
        """Return the states of all global tokens, given those of this process's tokens: [B or 1, n, X] → [B, X', X]."""
        states = states.expand(len(index), -1, -1)
        found = states.gather(1, index[:, :, None].expand(-1, -1, states.shape[2]))
        return SumOfProcesses.apply(torch.where(is_own[:, :, None], found, 0), shards.group)  # type: ignore[no-any-return]

    dealt = deal_heads(shards, attention.num_heads, num_tokens)
    key, value = attention.keys_and_values(hidden_states)
    query = attention.queries(of_all(hidden_states))
    if rotation is not None:
        key = rotate(key, *rotation)
        query = rotate(query, *(of_all(each) for each in rotation))
    key, value = dealt.whole_texts(key), dealt.whole_texts(value)
    out, _ = attention.read(query[:, dealt.own], key, value, rows.allowed)
    width = attention.head_dim
    out = dealt.all_heads(out.flatten(2), width).unflatten(2, (-1, width))
    return out, replace(rows, is_row=rows.is_row[:, first:stop], index=index, is_global=is_own)


def whole_lengths(shards: SequenceShards | None, num_queries: int, num_keys: int, tokens: Any) -> tuple[int, int]:
    """Return how many queries and keys there are of which some are global: of whole texts, where processes share them.

    tokens: the mask of the call, in this case of whole texts.
    """
    return (num_queries, num_keys) if shards is None else (tokens.shape[1], tokens.shape[1])


def keys_of_text(shards: SequenceShards | None, key: Tensor, tokens: TokenMask) -> int:
    """Return how many keys there are, those that other processes hold included: [B, H, K, D] and the mask → K."""
    return key.shape[2] if shards is None or tokens.shape is None else tokens.shape[1]
