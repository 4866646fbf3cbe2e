"""Softmax attention head by head, for layers that change what is compared or mixed."""

from typing import Any

import torch
from torch import Tensor


def states_of(attention: Any, text: Tensor) -> list[list[Tensor]]:
    """Return queries, keys and values of a text, [T, D] of each of 4 heads, which may share keys."""
    found = []
    for project in (attention.q_proj, attention.k_proj, attention.v_proj):
        heads = (text @ project.weight.T + project.bias).split(8, 1)
        found.append([heads[head * len(heads) // 4] for head in range(4)])
    return found


def readable(tokens: int, is_causal: bool, reach: int | None) -> Tensor:
    distances = torch.arange(tokens)[:, None] - torch.arange(tokens)
    read = distances >= 0 if is_causal else distances == distances
    return read if reach is None else read & (distances.abs() <= reach)


def compare(model: Any, text: Tensor, expected: Tensor, others: list[Tensor], is_causal: bool) -> None:
    """Compare the first layer's attention, outputs and gradients of the text and further parameters."""
    attention = model.layers[0].self_attn
    found = attention(text[None], output_attentions=False)[0][0]
    expected = expected @ attention.o_proj.weight.T + attention.o_proj.bias
    torch.testing.assert_close(found, expected, atol=1e-11, rtol=1e-9)
    weight = torch.randn(found.shape, dtype=torch.float64)
    given = [text, attention.v_proj.weight, *others]
    slopes = [torch.autograd.grad((each * weight).sum(), given) for each in (found, expected)]
    for own, wanted in zip(*slopes, strict=True):
        torch.testing.assert_close(own, wanted, atol=1e-9, rtol=1e-8)
