"""One softmax over the keys of several calls: outputs joined by their log-sum-exp, with gradients."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

import torch
from torch import Tensor

from hf_efficient_attn.attention.build_call import refuse_unknown
from hf_efficient_attn.errors import InputError
from hf_efficient_attn.layout.call import AttentionCall


def with_lse_gradient(call: AttentionCall, return_lse: bool = True) -> AttentionCall:
    """Return a call whose log-sum-exp is differentiable, if gradients are needed at all.

    Raises:
        InputError: the log-sum-exp is not returned.
    """
    if not return_lse:
        raise InputError("lse_gradient=True needs the log-sum-exp, which is not returned. Set return_lse=True.")
    return replace(call, lse_needs_grad=True) if call.inputs.needs_grad else call


def join_attention(parts: Sequence[tuple[Tensor, Tensor]], **unknown: NoReturn) -> tuple[Tensor, Tensor]:
    """Join attention over several sets of keys in one softmax; return the output and the log-sum-exp.

    Each part is what `attention(..., return_lse=True, lse_gradient=True)` returns for the same queries and another set
    of keys: an output [B, H, Nq, Dv] and a log-sum-exp [B, H, Nq]. No key may be in two sets. A query without a key in
    any part has output 0, log-sum-exp -inf and no gradient.

    out = Σ exp(lseₚ − lse) · outₚ, where lse = log Σ exp(lseₚ).

    >>> import torch
    >>> from hf_efficient_attn import attention
    >>> from hf_efficient_attn.patterns import Full
    >>> q, k, v = torch.randn(3, 1, 2, 6, 4, dtype=torch.float64)
    >>> options = {"cross": True, "return_lse": True, "lse_gradient": True}
    >>> halves = [attention(q, k[:, :, each], v[:, :, each], Full(), **options) for each in (slice(2), slice(2, 6))]
    >>> torch.allclose(join_attention(halves)[0], attention(q, k, v, Full()))
    True

    Raises:
        InputError: no parts, parts of different shapes, or an unknown argument.
    """
    refuse_unknown(unknown, join_attention)
    if not parts or any(out.shape != parts[0][0].shape or lse.shape != out.shape[:3] for out, lse in parts):
        shapes = [(list(out.shape), list(lse.shape)) for out, lse in parts]
        raise InputError(
            f"The parts have outputs and log-sum-exps of shapes {shapes}; there must be at least one, and all must be "
            "[batch, heads, queries, width] and [batch, heads, queries] of the same queries."
        )
    stacked = torch.stack([lse for _, lse in parts])
    has_keys = (stacked.detach() > -torch.inf).any(0)
    # the softmax of a row of -inf would be NaN, and so would its gradient
    stacked = torch.where(has_keys, stacked, 0.0)
    shares = torch.where(has_keys, stacked.softmax(0), 0.0)
    out = sum(share[..., None] * out.to(share.dtype) for share, (out, _) in zip(shares, parts, strict=True))
    return out.to(parts[0][0].dtype), torch.where(has_keys, stacked.logsumexp(0), -torch.inf)
