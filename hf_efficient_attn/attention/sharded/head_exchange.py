"""Attention of some heads over the whole text: processes exchange heads for tokens and back (DeepSpeed Ulysses).

Source: Jacobs et al. (arXiv:2309.14509). Any pattern can be computed so, by as many processes as divide the heads.
"""

from torch import Tensor

from hf_efficient_attn.attention.call import build_call, compute
from hf_efficient_attn.attention.content_choice import with_choice
from hf_efficient_attn.attention.layer_patterns import LayerPattern
from hf_efficient_attn.attention.sharded.exchange import exchanged
from hf_efficient_attn.attention.sharded.sharded_call import ShardedCall


def tokens_of_heads(states: Tensor, call: ShardedCall) -> Tensor:
    """Return the whole text of this process's heads, given all heads of its tokens: [B, H, n, D] → [B, H / P, N, D]."""
    lengths = [stop - first for first, stop in call.bounds]
    # [process, tokens, B, heads of it, D], whose first two are rows
    rows = states.unflatten(1, (len(lengths), -1)).permute(1, 3, 0, 2, 4).flatten(0, 1)
    received = exchanged(rows, [lengths[call.rank]] * len(lengths), lengths, call.shards.group)
    return received.permute(1, 2, 0, 3)


def heads_of_tokens(states: Tensor, call: ShardedCall) -> Tensor:
    """Return all heads of this process's tokens, given the whole text of its heads: the inverse."""
    lengths = [stop - first for first, stop in call.bounds]
    rows = states.permute(2, 0, 1, 3)
    received = exchanged(rows, lengths, [lengths[call.rank]] * len(lengths), call.shards.group)
    return received.unflatten(0, (len(lengths), -1)).permute(2, 0, 3, 1, 4).flatten(1, 2)


def repeat_key_heads(states: Tensor, num_heads: int, num_shards: int) -> Tensor:
    """Return keys or values with as many heads as processes can divide, every head repeated where it has to be."""
    num_key_heads = states.shape[1]
    if num_key_heads % num_shards == 0:
        return states
    # those of the query heads always can be
    repeats = num_shards // num_key_heads if num_shards % num_key_heads == 0 else num_heads // num_key_heads
    return states.repeat_interleave(repeats, 1)


def attend_heads(query: Tensor, key: Tensor, value: Tensor, call: ShardedCall) -> Tensor:
    """Return the output [B, H, n, Dv] of this process's tokens."""
    layout, scores, num_heads = call.layout, call.scores, query.shape[1] // len(call.bounds)
    key, value = (repeat_key_heads(each, query.shape[1], len(call.bounds)) for each in (key, value))
    query, key, value = (tokens_of_heads(each, call) for each in (query, key, value))
    own = slice(call.rank * num_heads, (call.rank + 1) * num_heads)
    followed = LayerPattern(
        layout.pattern,
        layout.layer,
        False,
        first_head=layout.first_head + own.start,
        num_model_heads=layout.num_model_heads or layout.num_heads,
    )
    followed, chosen = with_choice(followed, None, query, key, call.tokens, None)
    sinks = None if scores.sinks is None else scores.sinks[own]
    settings = (sinks, scores.softcap, scores.scale, scores.dropout)
    built = build_call(query, key, value, followed, None, call.tokens, (), *settings, chosen)
    return heads_of_tokens(compute(query, key, value, built, scores.backend)[0], call)
