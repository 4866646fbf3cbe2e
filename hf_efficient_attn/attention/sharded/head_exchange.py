"""Attention of some heads over the whole text: processes exchange heads for tokens and back (DeepSpeed Ulysses).

Source: Jacobs et al. (arXiv:2309.14509). Any pattern can be computed so, by as many processes as divide the heads.
"""

from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.attention.call import build_call, compute
from hf_efficient_attn.attention.layer_patterns import LayerPattern
from hf_efficient_attn.attention.sharded.exchange import send
from hf_efficient_attn.attention.sharded.halo import Scores
from hf_efficient_attn.attention.sharded.sequence_shards import Bounds
from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.layout.token_mask import TokenMask


class TokensOfHeads(torch.autograd.Function):
    """Give every process the whole text of its heads: [B, H, n, D] → [B, H / processes, N, D]."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, bounds: Bounds, rank: int, group: Any) -> Tensor:
        ctx.where = bounds, rank, group
        return gather_tokens(states, bounds, rank, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return scatter_tokens(gradient, *ctx.where), None, None, None


class HeadsOfTokens(torch.autograd.Function):
    """Give every process all heads of its tokens: [B, H / processes, N, D] → [B, H, n, D]."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, bounds: Bounds, rank: int, group: Any) -> Tensor:
        ctx.where = bounds, rank, group
        return scatter_tokens(states, bounds, rank, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return gather_tokens(gradient, *ctx.where), None, None, None


def gather_tokens(states: Tensor, bounds: Bounds, rank: int, group: Any) -> Tensor:
    """Return the whole text of this process's heads, given all heads of its tokens."""
    num_shards, lengths = len(bounds), [stop - first for first, stop in bounds]
    # [process, tokens, B, heads of it, D], whose first two are rows
    rows = states.unflatten(1, (num_shards, -1)).permute(1, 3, 0, 2, 4).flatten(0, 1)
    received = send(rows.contiguous(), [lengths[rank]] * num_shards, lengths, group)
    return received.permute(1, 2, 0, 3)


def scatter_tokens(states: Tensor, bounds: Bounds, rank: int, group: Any) -> Tensor:
    """Return all heads of this process's tokens, given the whole text of its heads."""
    num_shards, lengths = len(bounds), [stop - first for first, stop in bounds]
    received = send(states.permute(2, 0, 1, 3).contiguous(), lengths, [lengths[rank]] * num_shards, group)
    return received.unflatten(0, (num_shards, -1)).permute(2, 0, 3, 1, 4).flatten(1, 2)


def repeat_key_heads(states: Tensor, num_heads: int, num_shards: int) -> Tensor:
    """Return keys or values with as many heads as processes can divide, every head repeated where it has to be."""
    num_key_heads = states.shape[1]
    if num_key_heads % num_shards == 0:
        return states
    # those of the query heads always can be
    repeats = num_shards // num_key_heads if num_shards % num_key_heads == 0 else num_heads // num_key_heads
    return states.repeat_interleave(repeats, 1)


def attend_heads(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    bounds: Bounds,
    rank: int,
    group: Any,
    tokens: TokenMask,
    scores: Scores,
) -> Tensor:
    """Return the output [B, H, n, Dv] of this process's tokens; `layout` and `tokens` are those of the whole text."""
    num_heads, where = query.shape[1] // len(bounds), (bounds, rank, group)
    key, value = (repeat_key_heads(each, query.shape[1], len(bounds)) for each in (key, value))
    query, key, value = (TokensOfHeads.apply(each, *where) for each in (query, key, value))
    first_head = layout.first_head + rank * num_heads
    num_model_heads = layout.num_model_heads or layout.num_heads
    followed = LayerPattern(layout.pattern, layout.layer, False, first_head=first_head, num_model_heads=num_model_heads)
    sinks = scores.sinks
    sinks = None if sinks is None else sinks[rank * num_heads : (rank + 1) * num_heads]
    call = build_call(
        query, key, value, followed, None, tokens, (), sinks, scores.softcap, scores.scale, scores.dropout
    )
    out, _ = compute(query, key, value, call, scores.backend)
    return HeadsOfTokens.apply(out, *where)
