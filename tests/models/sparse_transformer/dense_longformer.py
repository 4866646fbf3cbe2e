"""Longformer's attention as its definition says it, over all pairs, in float64: what the family is compared with."""

import torch
from torch import Tensor


def dense_longformer(
    attention: torch.nn.Module, hidden: Tensor, side: int, is_token: Tensor, is_global: Tensor, step: int = 1
) -> Tensor:
    """Return a `SparseAttention`'s output [B, T, hidden_size] by loops over examples and queries.

    A query that is not global reads the tokens within `side` steps and all global ones by the local projections; a
    global one reads every token by its own (Beltagy et al., section 3.1). Rows of padding are the output bias.
    """
    other = attention.global_attention
    out = torch.zeros_like(hidden)
    for row, states in enumerate(hidden):
        local = [heads(p(states), attention.num_heads) for p in (attention.q_proj, attention.k_proj, attention.v_proj)]
        chosen = [heads(p(states), attention.num_heads) for p in (other.q_proj, other.k_proj, other.v_proj)]
        for query in range(len(states)):
            if not is_token[row, query]:
                continue
            q, k, v = chosen if is_global[row, query] else local
            keys = [
                key
                for key in range(len(states))
                if is_token[row, key]
                and (is_global[row, query] or is_global[row, key] or reads(query, key, side, step))
            ]
            scores = torch.einsum("hd,hkd->hk", q[:, query], k[:, keys]) * attention.head_dim**-0.5
            weighted = torch.einsum("hk,hkd->hd", torch.softmax(scores, -1), v[:, keys])
            out[row, query] = weighted.flatten()
    return attention.o_proj(out)


def reads(query: int, key: int, side: int, step: int) -> bool:
    """Return whether a window of `side` keys on each side, `step` tokens apart, has the key."""
    return (key - query) % step == 0 and abs(key - query) <= side * step


def heads(states: Tensor, num_heads: int) -> Tensor:
    """Return [T, hidden_size] as [H, T, D]."""
    return states.unflatten(-1, (num_heads, -1)).transpose(0, 1)
