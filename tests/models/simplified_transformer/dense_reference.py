"""Shaped attention as the paper writes it: one dense matrix α·I + β·A − γ·C per head, in float64."""

import copy
from typing import Any

import torch

from hf_efficient_attn.models.simplified_transformer.modeling_simplified_transformer import (
    SimplifiedTransformerAttention,
)


def allowed_pairs(
    tokens: int, is_causal: bool, padding: torch.Tensor | None = None, documents: torch.Tensor | None = None
) -> torch.Tensor:
    """Return which query may see which key, built pair by pair from its definition. Shape [B, T, T], bool."""
    rows = 1 if padding is None and documents is None else len(padding if padding is not None else documents)
    allowed = torch.zeros(rows, tokens, tokens, dtype=torch.bool)
    for row in range(rows):
        for query in range(tokens):
            for key in range(tokens):
                is_past = key <= query or not is_causal
                is_real = padding is None or bool(padding[row, key])
                is_same = documents is None or bool(documents[row, key] == documents[row, query])
                allowed[row, query, key] = is_past and is_real and is_same
    return allowed


def reads(pattern: Any, query: torch.Tensor, key: torch.Tensor, is_causal: bool = True) -> torch.Tensor:
    """Return which query of a text reads which key, [H, T, T], pair by pair from the definition of the pattern.

    One that chooses by content is causal.
    """
    num_heads, tokens, _ = query.shape
    found = torch.zeros(num_heads, tokens, tokens, dtype=torch.bool)
    for head in range(num_heads):
        for row in range(tokens):
            if pattern.chooses_by_content:
                own, size = row // pattern.block_tokens, pattern.block_tokens
                scores = [float(query[head, row] @ key[head, b * size : (b + 1) * size].mean(0)) for b in range(own)]
                best = sorted(range(own), key=lambda b: (-scores[b], b))[: pattern.num_chosen - 1]
                keys = [j for j in range(row + 1) if j // size in (own, *best)]
            else:
                keys = [j for j in range(row + 1 if is_causal else tokens) if pattern.allowed(row, j)]
            found[head, row, keys] = True
    return found


def centring_matrix(allowed: torch.Tensor) -> torch.Tensor:
    """Return C: equal weight on every allowed key. Shape as `allowed`, float64."""
    return allowed.double() / allowed.double().sum(-1, keepdim=True).clamp(min=1)


def softmax_matrix(logits: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """Return A, with zeros in rows that may see nothing. Shapes: [B, H, T, T], [B, 1, T, T] → [B, H, T, T]."""
    return logits.masked_fill(~allowed, -torch.inf).softmax(-1).nan_to_num(0.0)


def shaped_matrix(attention: SimplifiedTransformerAttention, x: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """Return α·I + β·A − γ·C of a float64 attention module without positions. Shape [B, H, T, T]."""
    heads = (*x.shape[:-1], -1, attention.head_dim)
    query = attention.q_proj(x).view(heads).transpose(1, 2)
    key = attention.k_proj(x).view(heads).transpose(1, 2)
    softmax = softmax_matrix(query @ key.transpose(2, 3) * attention.scaling, allowed.unsqueeze(1))
    identity, centre = torch.eye(x.shape[1], dtype=x.dtype), centring_matrix(allowed).unsqueeze(1)
    alpha, beta, gamma = (
        value.view(1, -1, 1, 1)
        for value in (attention.identity_gain.gain, attention.softmax_gain.gain, attention.centering_gain.gain)
    )
    return alpha * identity + beta * softmax - gamma * centre


def dense_shaped_attention(
    attention: SimplifiedTransformerAttention, x: torch.Tensor, allowed: torch.Tensor
) -> torch.Tensor:
    """Return the output of shaped attention by one matrix product per head. Shapes: [B, T, hidden_size] → the same."""
    values = x if attention.v_proj is None else attention.v_proj(x)
    value = values.unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
    out = (shaped_matrix(attention, x, allowed) @ value).transpose(1, 2).flatten(2)
    return out if attention.o_proj is None else attention.o_proj(out)


def in_float64(attention: SimplifiedTransformerAttention) -> SimplifiedTransformerAttention:
    return copy.deepcopy(attention).double()
