"""Attention of some heads over the whole text: processes exchange heads for tokens and back (DeepSpeed Ulysses).

Any pattern can be computed so, by as many processes as there are heads.
"""

from dataclasses import replace

from torch import Tensor

from hf_efficient_attn.attention.dispatch import attend
from hf_efficient_attn.attention.layer_patterns import LayerPattern
from hf_efficient_attn.attention.sharded.dealt_heads import DealtHeads, deal_heads
from hf_efficient_attn.attention.sharded.sequence_shards import Bounds
from hf_efficient_attn.attention.sharded.sharded_call import ShardedCall
from hf_efficient_attn.attention.sharded.traffic import repeated_heads
from hf_efficient_attn.layout.score_terms import Term


def repeat_key_heads(states: Tensor, num_heads: int, num_shards: int) -> Tensor:
    """Return keys or values with as many heads as processes can divide, every head repeated where it has to be."""
    num_key_heads = states.shape[1]
    repeats = repeated_heads(num_key_heads, num_heads, num_shards) // num_key_heads
    return states if repeats == 1 else states.repeat_interleave(repeats, 1)


def attend_heads(query: Tensor, key: Tensor, value: Tensor, call: ShardedCall) -> Tensor:
    """Return the output [B, H, n, Dv] of this process's tokens."""
    layout, scores, num_heads = call.layout, call.scores, query.shape[1]
    dealt = deal_heads(call.shards, num_heads, layout.num_keys)
    key, value = (repeat_key_heads(each, num_heads, call.shards.size) for each in (key, value))
    of_keys = deal_heads(call.shards, key.shape[1], layout.num_keys)
    query = dealt.whole_texts(query)
    key, value = (of_keys.whole_texts(each) for each in (key, value))
    terms = tuple(term_of_heads(each, dealt) for each in scores.terms)
    followed = LayerPattern(
        layout.pattern,
        layout.layer,
        False,
        first_head=layout.first_head + dealt.own.start,
        num_model_heads=layout.num_model_heads or layout.num_heads,
    )
    sinks = None if scores.sinks is None else scores.sinks[dealt.own]
    settings = (sinks, scores.softcap, scores.scale, scores.dropout)
    out, _ = attend(query, key, value, followed, None, call.tokens, terms, *settings, backend=scores.backend)
    return dealt.own_tokens(out)


def term_of_heads(term: Term, dealt: DealtHeads) -> Term:
    """Return a term of all queries of this process's heads, given that of all heads of its queries."""
    values, num_heads = term.values, dealt.heads[-1][1]
    if not is_by_query(term, dealt.tokens):
        return term if values.shape[1] == 1 else replace(term, values=values[:, dealt.own])
    first, stop = dealt.tokens[dealt.shards.rank]
    return replace(term, values=dealt.whole_texts(values.expand(-1, num_heads, stop - first, -1)))


def is_by_query(term: Term, bounds: Bounds) -> bool:
    """Return whether a term has values for each query; all processes must say the same.

    Where one of them holds a single query, it could not tell: then all take it that it has.
    """
    return term.values.shape[2] > 1 or any(stop - first == 1 for first, stop in bounds)
