"""Attention sinks and soft caps: a logit beside the keys of every row, and scores bounded by a hyperbolic tangent."""

import torch
from torch import Tensor


def cap(scores: Tensor, softcap: float | None) -> Tensor:
    """Return softcap · tanh(scores / softcap); None: the scores as they are. Source: Gemma 2 (arXiv:2408.00118)."""
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap


def join_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return output and lse of rows whose softmax also counts a sink, which has no value.

    out' = out · σ(lse − s) and lse' = log(exp(lse) + exp(s)); a row without keys has lse' = s, and a sink
    of -inf counts nothing. Source: GPT-OSS.

    Args:
        out: [B, H, N, D] of ordinary attention; lse: [B, H, N].
        sinks: s, a logit for each head, [H].
    """
    logits = sinks.to(lse.dtype)[:, None]
    # the output of rows without keys is 0 whatever the share; of -inf and a sink of -inf there is no difference
    share = torch.sigmoid(lse.masked_fill(lse == -torch.inf, 0.0) - logits)
    return out * share[..., None].to(out.dtype), torch.logaddexp(lse, logits)
