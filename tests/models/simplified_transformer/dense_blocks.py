"""Layers of SAS blocks with a mechanism against their dense form: what the tests of each mechanism share."""

from collections.abc import Callable
from typing import Any

import torch
from models.simplified_transformer.dense_reference import allowed_pairs, centring_matrix, softmax_matrix
from models_cases import random_ids
from torch import Tensor

TOKENS = 13
DOCUMENTS = torch.tensor([[0] * 4 + [1] * 9, [0] * 12 + [1]])


def masks_with(padded: Tensor) -> dict[str, dict[str, Tensor]]:
    """Return the arguments of calls without a mask, with this padding mask, and of packed documents."""
    packed = torch.tensor([[*range(4), *range(9)], [*range(12), 0]])
    return {"none": {}, "padded": {"attention_mask": padded}, "packed": {"position_ids": packed}}


def projected(attention: Any, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values of states [B, T, hidden_size], each [B, H, T, D]."""
    query, key = (attention._heads(project(states)) for project in (attention.q_proj, attention.k_proj))
    return query, key, attention._heads(states if attention.v_proj is None else attention.v_proj(states))


def shaped(attention: Any, read: Tensor, centre: Tensor, value: Tensor) -> Tensor:
    """Return W^P of (α·I + β·A − γ·C)·V, [B, T, hidden_size], of A and C as matrices, [B, H or 1, T, T]."""
    alpha, beta, gamma = (
        gain.gain.view(-1, 1, 1) for gain in (attention.identity_gain, attention.softmax_gain, attention.centering_gain)
    )
    matrix = alpha * torch.eye(value.shape[2], dtype=value.dtype) + beta * read - gamma * centre
    out = (matrix @ value).transpose(1, 2).flatten(2)
    return out if attention.o_proj is None else attention.o_proj(out)


def features(attention: Any, states: Tensor) -> Tensor:
    """Return φ of linear attention, by its formula, [B, H, T, D] → [B, H, T, F]."""
    if not hasattr(attention.linear.features, "vectors"):
        return torch.where(states > 0, states + 1, states.exp())
    vectors = attention.linear.features.vectors.to(states)
    states = states / states.shape[-1] ** 0.25
    return (states @ vectors.T - states.square().sum(-1, keepdim=True) / 2).exp()


def dense_linear(attention: Any, states: Tensor, allowed: Tensor) -> Tensor:
    """Return W^P of (α·I + β·A − γ·C)·V by one matrix for each head, [B, T, hidden_size] → the same."""
    query, key, value = projected(attention, states)
    weights = features(attention, query) @ features(attention, key).mT * allowed.unsqueeze(1)
    # padding may read nothing
    read = weights / weights.sum(-1, keepdim=True).clamp(min=1e-300)
    return shaped(attention, read, centring_matrix(allowed).unsqueeze(1), value)


def dense_softmax(attention: Any, states: Tensor, allowed: Tensor) -> Tensor:
    """Return the same of a layer with softmax attention, with a prior if it has one.

    allowed: [B, T, T], or by head, [B, H, T, T].
    """
    query, key, value = projected(attention, states)
    prior = torch.zeros(())
    if attention.prior is not None:
        squares = (torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)).square().double()
        of_heads = (attention.prior.prior_weight, attention.prior.prior_bias)
        weight, bias = (each.abs().view(-1, 1, 1) for each in of_heads)
        prior = -(weight * squares - bias).abs()
    products = query @ key.mT / attention.head_dim**0.5
    allowed = allowed if allowed.ndim == 4 else allowed.unsqueeze(1)
    read, centre = (softmax_matrix(scores + prior, allowed) for scores in (products, torch.zeros_like(products)))
    return shaped(attention, read, centre, value)


def check_layers(
    model: Any,
    inputs: dict[str, Tensor],
    dense: Callable[[Any, Tensor, Tensor], Tensor],
    learned: Callable[[Any], list[Tensor]],
    tolerance: float,
    slope_tolerances: tuple[float, float],
) -> None:
    """Check outputs and gradients of all layers, but for padding.

    Args:
        inputs: one of `masks_with`.
        dense: returns the output of a layer for its states and the allowed pairs.
        learned: returns the parameters of a layer whose gradients are compared, beside those of its states.
        tolerance: of outputs, absolute and relative.
        slope_tolerances: of gradients, the absolute one first.
    """
    seen = []
    for layer in model.layers:
        layer.self_attn.register_forward_hook(lambda module, given, out: seen.append((module, given[0], out[0])))
    model(random_ids(2, TOKENS), **inputs)
    padding, documents = inputs.get("attention_mask"), DOCUMENTS if "position_ids" in inputs else None
    allowed = allowed_pairs(TOKENS, model.config.is_causal, padding, documents)
    real = torch.ones(2, TOKENS, dtype=torch.bool) if padding is None else padding.bool()
    for attention, states, out in seen:
        found, expected = out[real], dense(attention, states, allowed)[real]
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
        weight = torch.randn(found.shape, dtype=torch.float64)
        given = [states, *learned(attention)]
        slopes = [torch.autograd.grad((each * weight).sum(), given, retain_graph=True) for each in (found, expected)]
        for own, wanted in zip(*slopes, strict=True):
            torch.testing.assert_close(own, wanted, atol=slope_tolerances[0], rtol=slope_tolerances[1])
    assert len(seen) == len(model.layers)
