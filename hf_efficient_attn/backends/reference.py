"""Attention as the formula says it: all scores, one softmax, gradients by autograd. What it returns is correct."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import dropout as drop

from hf_efficient_attn.layout.dense import allowed_pairs, close_pairs, lse_dtype, term_bias
from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.layout.request import Request
from hf_efficient_attn.layout.terms import Term
from hf_efficient_attn.layout.token_mask import TokenMask

NAME = "reference"


def why_not(request: Request) -> str | None:
    """Return None: everything can be computed this way, given the memory for all pairs."""
    return None


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    tokens: TokenMask,
    terms: Sequence[Term],
    scale: float,
    dropout: float,
    need_lse: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Return the output [batch, heads, queries, value_dim] and each row's lse [batch, heads, queries].

    Computes in float32, or in float64 for float64 inputs.

    Args:
        q: [batch, heads, queries, head_dim].
        k, v: [batch, key heads, keys, head_dim or value_dim].
        scale: of the scores, before terms are added.
        dropout: probability with which a weight is dropped.
        need_lse: False: None may be returned in the place of lse.
    """
    dtype = lse_dtype(q)
    heads_per_key_head = q.shape[1] // k.shape[1]
    keys = k.to(dtype).repeat_interleave(heads_per_key_head, 1)
    values = v.to(dtype).repeat_interleave(heads_per_key_head, 1)

    scores = q.to(dtype) @ keys.transpose(-1, -2) * scale
    bias = term_bias(terms, layout, tokens, q.device)
    allowed = allowed_pairs(layout, tokens, q.shape[0], q.device)
    if bias is not None:
        bias, allowed = close_pairs(bias, allowed)
        scores = scores + bias
    lse = None
    if allowed is None:
        weights = torch.softmax(scores, -1)
    else:
        # a row without keys takes the softmax of its scores as they are; then all of its weights are cut
        has_keys = allowed.any(-1, keepdim=True)
        weights = torch.softmax(scores.masked_fill(~allowed & has_keys, -torch.inf), -1).masked_fill(~allowed, 0)
    if need_lse:
        readable = scores.detach() if allowed is None else scores.detach().masked_fill(~allowed, -torch.inf)
        lse = torch.logsumexp(readable, -1)
    return (drop(weights, dropout) @ values).to(q.dtype), lse
