"""Attention as two sums, without learned parts."""

from math import inf

import torch
from torch import Tensor

from hf_efficient_attn.layout.call import AttentionCall
from hf_efficient_attn.layout.dense.lse import lse_dtype
from hf_efficient_attn.layout.dense.pairs import allowed_pairs

NAME = "einsum"
BYTES_PER_SCORE = 9


def why_not(call: AttentionCall) -> str | None:
    """Return why it cannot compute a call."""
    if call.query_start is not None:
        return "einsum cannot compile a query_offset that is a tensor: use blocked."
    if call.terms or call.sinks is not None or call.softcap is not None or call.dropout:
        return "einsum knows neither terms, sinks, soft caps nor dropout: use reference."
    return None


def none(call: AttentionCall) -> None:
    """Return None: nothing needs to be installed, and nothing takes it unasked, compiled programs included."""


missing = rank_while_compiling = none


def is_fastest(call: AttentionCall) -> bool:
    """Return False: others are faster."""
    return False


def cost(call: AttentionCall) -> float:
    """Return infinity: it is computed by name only."""
    return inf


def remark(call: AttentionCall) -> str:
    """Return why it is not taken."""
    return "einsum keeps all scores in memory."


def computed_pairs(call: AttentionCall) -> int:
    """Return the number of all pairs, whose scores are kept."""
    return call.layout.num_pairs


def working_bytes(call: AttentionCall) -> int:
    """Return the memory of scores, weights and mask."""
    return BYTES_PER_SCORE * computed_pairs(call)


def attend(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, need_lse: bool = True) -> tuple[Tensor, Tensor | None]:
    """Return output and lse, computed in float32, or in float64 for float64 inputs; see `Backend`."""
    dtype = lse_dtype(q)
    # heads in groups that share keys: [B, key heads, group, N, D]
    queries = q.to(dtype).unflatten(1, (k.shape[1], -1))
    scores = call.scale * torch.einsum("bhgqd,bhkd->bhgqk", queries, k.to(dtype)).flatten(1, 2)
    allowed = allowed_pairs(call.layout, call.tokens, q.shape[0], q.device)
    allowed = torch.ones((), dtype=torch.bool) if allowed is None else allowed
    lse = scores.detach().masked_fill(~allowed, -inf).logsumexp(-1)
    # a row without keys has finite weights, of which none is left
    weights = scores.masked_fill(~allowed, torch.finfo(dtype).min).softmax(-1).masked_fill(~allowed, 0.0)
    out = torch.einsum("bhgqk,bhkd->bhgqd", weights.unflatten(1, (k.shape[1], -1)), v.to(dtype)).flatten(1, 2)
    return out.to(q.dtype), lse
