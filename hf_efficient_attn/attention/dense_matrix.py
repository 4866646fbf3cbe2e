"""Attention with a given matrix over all pairs, or that returns one; it takes memory for all pairs."""

import torch
from torch import Tensor
from torch.nn.functional import dropout as drop
from torch.nn.functional import scaled_dot_product_attention

from hf_efficient_attn.backends.kernels import plain_rows
from hf_efficient_attn.errors import InputError
from hf_efficient_attn.layout.call import cap
from hf_efficient_attn.layout.dense_mask import lse_dtype
from hf_efficient_attn.layout.tracing import autocast_off, autocast_states


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    allowed: Tensor | None,
    bias: Tensor | None,
    scale: float,
    dropout: float,
    need_weights: bool,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the output [batch, heads, queries, head_dim] and the weights [batch, heads, queries, keys], or None.

    Args:
        query: [batch, heads, queries, head_dim].
        key, value: [batch, key heads, keys, head_dim].
        allowed: bool that broadcasts to [batch, heads, queries, keys]; None: all pairs. A query without keys gets 0.
        bias: of the same shape, added to the scores.
        need_weights: if False, the second result is None.
        sinks, softcap: as for `attention`; the weights of a row with a sink sum to less than 1.
    """
    query, key, value = autocast_states(query, key, value)
    heads_per_key_head = query.shape[1] // key.shape[1]
    if heads_per_key_head > 1:
        key, value = (each.repeat_interleave(heads_per_key_head, 1) for each in (key, value))
    added, has_keys = added_and_keys(allowed, bias, query)
    with autocast_off(query.device.type):
        if not need_weights and sinks is None and softcap is None:
            return _fused(query, key, value, added, has_keys, scale, dropout), None
        out, weights = _explicit(query, key, value, added, has_keys, scale, dropout, sinks, softcap)
    return out, weights if need_weights else None


def added_and_keys(allowed: Tensor | None, bias: Tensor | None, query: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return what is added to the scores, in the dtype of `query`, and which queries have keys; None: nothing, all."""
    if allowed is None:
        return None if bias is None else bias.to(query.dtype), None
    has_keys = allowed.any(-1, keepdim=True)
    # a query without keys gets the softmax of its unmasked scores, which is then set to 0
    added = torch.zeros((), dtype=query.dtype, device=query.device) if bias is None else bias.to(query.dtype)
    return torch.where(allowed | ~has_keys, added, -torch.inf), has_keys


def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    added: Tensor | None,
    has_keys: Tensor | None,
    scale: float,
    dropout: float,
) -> Tensor:
    if query.device.type == "cpu":
        query, key, value = plain_rows(query, key, value)
    out = scaled_dot_product_attention(query, key, value, added, dropout, scale=scale)
    return out if has_keys is None else out.masked_fill(~has_keys, 0)


def _explicit(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    added: Tensor | None,
    has_keys: Tensor | None,
    scale: float,
    dropout: float,
    sinks: Tensor | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    scores = cap(query @ key.transpose(-1, -2) * scale, softcap)
    scores = scores if added is None else scores + added
    if sinks is not None:
        # the sink is one more key, whose weight is dropped
        scores = torch.cat([scores, sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)], -1)
    weights = torch.softmax(scores, -1, dtype=lse_dtype(query)).to(query.dtype)
    weights = drop(weights[..., : key.shape[2]], dropout)
    # before they are used, so that gradients flow through the weights that are returned
    weights = weights if has_keys is None else weights.masked_fill(~has_keys, 0)
    return weights @ value, weights


def check_matrix(name: str, matrix: Tensor, shape: tuple[int, int, int, int]) -> None:
    """Refuse a mask or bias that does not broadcast to [batch, heads, queries, keys].

    Raises:
        InputError: names the shape, or a dtype that is neither bool nor floating-point.
    """
    fits = matrix.dim() == 4 and all(size in (1, full) for size, full in zip(matrix.shape, shape, strict=True))
    if not fits or matrix.shape[3] != shape[3]:
        raise InputError(
            f"{name} has shape {list(matrix.shape)}; as a matrix it must be [batch or 1, heads or 1, queries or 1, "
            f"keys] = [{shape[0]} or 1, {shape[1]} or 1, {shape[2]} or 1, {shape[3]}]."
        )
    if matrix.dtype != torch.bool and not matrix.is_floating_point():
        raise InputError(
            f"{name} has dtype {matrix.dtype}; a matrix must be bool, True = may be read, or floating-point, added to "
            f"the scores. Use {name}.bool() on a matrix of 0 and 1."
        )
