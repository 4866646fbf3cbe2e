"""Attention sinks and soft caps: a logit besides the keys of every row, and scores bounded by a hyperbolic tangent."""

import torch
from torch import Tensor
from torch.nn.functional import softplus


def cap(scores: Tensor, softcap: float | None) -> Tensor:
    """Return softcap · tanh(scores / softcap), or the scores if softcap is None. Source: Gemma 2 (arXiv:2408.00118)."""
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap


def join_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output and lse of rows whose softmax also counts a sink, which has no value.

    out' = out · σ(lse − s) and lse' = log(exp(lse) + exp(s)); a row without keys has lse' = s, and a sink
    of -inf changes nothing. Source: GPT-OSS.

    Args:
        out, lse: [B, H, N, D] and [B, H, N], those of attention without sinks.
        sinks: s, a logit for each head, [H].
    """
    logits = sinks.to(lse.dtype)[:, None]
    # rows without keys have output 0 whatever the share; masked, since -inf minus a sink of -inf is NaN
    excess = logits - lse.masked_fill(lse == -torch.inf, 0.0)
    # σ(−excess), whose derivative by autograd is also right to rounding where it is near 1
    share = torch.exp(-softplus(excess, threshold=50))
    return out * share[..., None].to(out.dtype), torch.logaddexp(lse, logits)
