"""The blocked backend: pure PyTorch, time and memory linear in the length, forward and backward, on any device."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_efficient_attn.backends.blocked.operator import blocked_attention
from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.layout.plan import write_plan
from hf_efficient_attn.layout.request import Request
from hf_efficient_attn.layout.terms import Term
from hf_efficient_attn.layout.token_mask import TokenMask

NAME = "blocked"
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


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
    query_start: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the output [batch, heads, queries, value_dim] and each row's lse [batch, heads, queries].

    Args:
        q: [batch, heads, queries, head_dim].
        k, v: [batch, key heads, keys, head_dim or value_dim].
        scale: of the scores, before terms are added.
        dropout: probability with which a weight is dropped; drawn from torch's global generator, once per call.
        need_lse: of no use here; lse is always there.
        query_start: position of the first query as an integer tensor, in the place of the layout's `query_offset`.
    """
    labels = tuple(term.label for term in terms)
    plan = write_plan(layout.pattern, layout.layer, labels, layout.first_head, layout.num_model_heads)
    seed = torch.randint(2**62, (), dtype=torch.int64) if dropout > 0.0 else None
    return blocked_attention(
        q,
        k,
        v,
        tokens.key_mask,
        tokens.segment_ids,
        tokens.global_mask,
        [term.values for term in terms],
        seed,
        query_start,
        plan,
        layout.query_offset,
        scale,
        dropout,
    )


def why_not(request: Request) -> str | None:
    """Return one sentence why this backend cannot compute a request; None: it can."""
    if request.dtype not in DTYPES:
        known = ", ".join(str(dtype) for dtype in DTYPES)
        return f"dtype {request.dtype} is none of {known}; convert the inputs."
    return None
