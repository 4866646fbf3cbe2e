"""Attention by its formula: all scores, one softmax, gradients by autograd. Other backends are tested against it."""

from math import inf

import torch
from torch import Tensor
from torch.nn.functional import dropout as drop

from hf_efficient_attn.layout.call import AttentionCall, cap
from hf_efficient_attn.layout.dense_mask import allowed_pairs, lse_dtype, read_pairs
from hf_efficient_attn.layout.grouped_reference import in_groups

NAME = "reference"
# the last rank: it computes what all others refuse
RANK = 40
# of the mask (1), the scores (4) and the softmax (4), all of which are in memory together
BYTES_PER_SCORE = 9


def why_not(call: AttentionCall) -> str | None:
    """Return why a call whose position is unknown while compiling is refused; None: all others can be computed."""
    if call.query_start is not None:
        return "reference cannot compile a query_offset that is a tensor: use blocked."
    return None


def missing(call: AttentionCall) -> str | None:
    """Return None: nothing needs to be installed."""
    return None


def is_fastest(call: AttentionCall) -> bool:
    """Return False: others are faster."""
    return False


def cost(call: AttentionCall) -> float:
    """Return infinity: this backend is for comparisons."""
    return inf


def rank(call: AttentionCall) -> int | None:
    """Return the last rank: it needs memory for all pairs."""
    return RANK


def remark(call: AttentionCall) -> str:
    """Return why it is not chosen."""
    return "reference keeps all scores in memory; the other backends are checked against it."


def computed_pairs(call: AttentionCall) -> int:
    """Return the number of all pairs."""
    return call.layout.num_pairs


def working_bytes(call: AttentionCall) -> int:
    """Return the memory of all scores."""
    return BYTES_PER_SCORE * call.layout.num_pairs


def attend(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, need_lse: bool = True) -> tuple[Tensor, Tensor | None]:
    """Return output and lse, computed in float32, or in float64 for float64 inputs; see `Backend`."""
    dtype = lse_dtype(q)
    heads_per_key_head = q.shape[1] // k.shape[1]
    keys = k.to(dtype).repeat_interleave(heads_per_key_head, 1)
    values = v.to(dtype).repeat_interleave(heads_per_key_head, 1)

    scores = cap(q.to(dtype) @ keys.transpose(-1, -2) * call.scale, call.softcap)
    allowed = allowed_pairs(call.layout, call.tokens, q.shape[0], q.device)
    if call.chosen is not None and call.chosen.needs_groups:
        out, group_lse = in_groups(scores, values, allowed, call)
        return out.to(q.dtype), group_lse.detach()
    pairs, added = read_pairs(allowed, call.terms, call.chosen, call.layout, call.tokens, k.shape[1], dtype, q.device)
    scores = scores if added is None else scores + added
    allowed = torch.ones(1, dtype=torch.bool, device=q.device) if pairs is None else pairs
    # the sink is one more key, which has a score but no value
    closed = scores.new_full((), -torch.inf) if call.sinks is None else call.sinks.to(dtype)[:, None, None]
    sinks = closed.expand(*scores.shape[:3], 1)
    # a row without keys gets the softmax of its unmasked scores; its weights are then set to 0
    has_keys = allowed.any(-1, keepdim=True)
    joined = torch.cat([scores.masked_fill(~allowed & has_keys, -torch.inf), sinks], -1)
    weights = torch.softmax(joined, -1)[..., :-1].masked_fill(~allowed, 0)
    lse = None
    if need_lse:
        # `joined` is not masked in rows without keys, because the log-sum-exp of only -inf has a NaN gradient
        lse = torch.where(has_keys[..., 0], joined.logsumexp(-1), sinks[..., 0])
        lse = lse if call.lse_needs_grad else lse.detach()
        if call.masked_queries is not None:
            lse = lse.masked_fill(call.masked_queries[..., 0], -torch.inf)
    return (drop(weights, call.dropout) @ values).to(q.dtype), lse
