"""The ways in which processes that share a text get the keys that they need."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.attention.sharded.halo import attend_halo
from hf_efficient_attn.attention.sharded.head_exchange import attend_heads
from hf_efficient_attn.attention.sharded.key_exchange import KeyExchange, key_exchange, texts_of
from hf_efficient_attn.attention.sharded.sequence_shards import SequenceShards, shard_bounds
from hf_efficient_attn.attention.sharded.sharded_call import Scores, ShardedCall
from hf_efficient_attn.attention.sharded.wide_queries import with_wide_queries
from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.patterns.expressions import parse_pattern

HALO, WAITING, ALL_GATHER, HEADS = "halo", "halo, waiting", "all-gather", "heads"
WAYS = (HALO, WAITING, ALL_GATHER, HEADS)
SEED = 0

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def attention_of(way: str, settings: dict[str, Any], shards: SequenceShards) -> Attention | None:
    """Return what computes the output of a process's tokens in one way; None: the heads cannot be divided.

    All compute the same by the same kernels: "halo" exchanges what the pattern lets queries read, "all-gather" all keys
    and values, as engines do that know nothing of the pattern, "heads" whole texts of some heads.
    """
    num_tokens, num_heads = settings["tokens"], settings["heads"]
    if way == HEADS and num_heads % shards.size:
        return None
    tokens = TokenMask(torch.ones(settings["batch_size"], num_tokens, dtype=torch.bool))
    layout = Layout(parse_pattern(settings["pattern"]), num_heads, num_tokens, num_tokens)
    bounds = shard_bounds(num_tokens, shards.size)
    examples = texts_of(tokens, settings["batch_size"], num_tokens)
    if way == ALL_GATHER:
        others = [((0, first), (stop, num_tokens)) for first, stop in bounds]
        wanted = tuple(tuple(each for each in two if each[0] < each[1]) for two in others)
        exchange = KeyExchange(wanted, (), ((),) * shards.size)
    else:
        exchange = key_exchange(
            layout, tuple(dict.fromkeys(examples)), bounds, True, num_heads // settings["key_heads"]
        )
    call = ShardedCall(layout, tokens, shards, bounds, examples, exchange, Scores(settings["head_dim"] ** -0.5))

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if way == HEADS:
            return attend_heads(query, key, value, call)
        out = attend_halo(query, key, value, call)
        return with_wide_queries(out, query, key, value, call) if exchange.wide else out

    return attend


def states_of(settings: dict[str, Any], shards: SequenceShards) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the queries, keys and values of this process's tokens, and the gradient of its output."""
    first, stop = shard_bounds(settings["tokens"], shards.size)[shards.rank]
    generator = torch.Generator().manual_seed(SEED + shards.rank)
    dtype, sizes = getattr(torch, settings["dtype"]), (stop - first, settings["head_dim"])

    def draw(num_heads: int) -> Tensor:
        return torch.randn(settings["batch_size"], num_heads, *sizes, generator=generator, dtype=dtype)

    heads, key_heads = settings["heads"], settings["key_heads"]
    query, key, value = (draw(count).requires_grad_() for count in (heads, key_heads, key_heads))
    return query, key, value, draw(heads)
