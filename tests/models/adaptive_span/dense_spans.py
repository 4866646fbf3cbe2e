"""Attention within spans as the paper writes it, a = m·exp(s) / Σ m·exp(s), over all pairs: the reference of ours."""

import torch
from torch import Tensor

from hf_efficient_attn.models.spans.config import SpanWindow


def key_index(num_queries: int, num_keys: int, window: SpanWindow) -> Tensor:
    """Return how many keys lie nearer to a query than a key, int [T, K]; below 0 or from the limit on: it is no key.

    The queries are the last of the keys' positions.
    """
    queries = torch.arange(num_keys - num_queries, num_keys)[:, None]
    distance = queries - torch.arange(num_keys)
    return (distance if window.is_causal else distance.abs()) - window.shift


def soft_mask(spans: Tensor, num_queries: int, num_keys: int, window: SpanWindow) -> Tensor:
    """Return m_z of every pair, [B or 1, H, T, K], for spans in tokens [1, H, 1] or [B, H, T]."""
    index = key_index(num_queries, num_keys, window)
    ramp = (window.ramp + spans[..., None] - index) / window.ramp
    is_read = (index >= 0) & (index < window.limit) & (ramp > 0)
    return torch.where(is_read, ramp.clamp(max=1.0), 0.0)


def dense_weights(
    query: Tensor,
    key: Tensor,
    spans: Tensor,
    window: SpanWindow,
    scale: float,
    position_table: Tensor | None = None,
    allowed: Tensor | bool = True,
) -> Tensor:
    """Return the weights [B, H, T, K], 0 in rows without keys.

    Args:
        query, key: [B, H, T, D] and [B, H, K, D].
        position_table: [limit, D], added to the key at each index.
        allowed: bool that broadcasts to the weights; further pairs that do not exist.
    """
    num_queries, num_keys = query.shape[2], key.shape[2]
    scores = query @ key.transpose(2, 3)
    if position_table is not None:
        rows = position_table[key_index(num_queries, num_keys, window).clamp(0, window.limit - 1)]
        scores = scores + torch.einsum("bhtd,tkd->bhtk", query, rows)
    mass = soft_mask(spans, num_queries, num_keys, window) * allowed * (scores * scale).exp()
    total = mass.sum(-1, keepdim=True)
    return mass / torch.where(total > 0, total, 1.0)
