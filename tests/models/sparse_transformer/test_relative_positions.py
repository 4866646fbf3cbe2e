"""Transformer-XL's relative positions against their formula, in float64 with gradients."""

from typing import Any

import pytest
import torch
from models_cases import TINY, randomize

import hf_efficient_attn as hea
from hf_efficient_attn.layout.score_terms import Distance
from hf_efficient_attn.models.parts.embeddings import sinusoids
from hf_efficient_attn.models.parts.relative_positions import within
from hf_efficient_attn.patterns import Band, Dilated, Pattern, PerHead


def test_equals_the_formula() -> None:
    pattern = PerHead([Band(3, 0)] * 3 + [Dilated(6, 0, 2)])
    config = hea.SparseTransformerConfig.longformer_char_lm(
        **{**TINY, "num_hidden_layers": 1, "attention_pattern": pattern, "attention_dropout": 0.0}
    )
    model = randomize(hea.SparseTransformerModel(config).eval()).double()
    attention = model.layers[0].self_attn
    hidden = torch.randn(2, 13, TINY["hidden_size"], dtype=torch.float64, requires_grad=True)
    q, k, v = (
        p(hidden).unflatten(-1, (4, 8)).transpose(1, 2) for p in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    index = torch.arange(13)
    distance = index[:, None] - index
    relative = attention.relative
    rows = relative.r_proj(sinusoids(distance, TINY["hidden_size"]).double()).unflatten(-1, (4, 8))
    scores = (q + relative.content_bias) @ k.transpose(2, 3)
    scores = scores + torch.einsum("bhid,ijhd->bhij", q + relative.position_bias, rows)
    allowed = torch.stack([head.causal().allowed(index[:, None], index) for head in pattern.heads(4)])
    weights = torch.softmax((scores * 8**-0.5).masked_fill(~allowed, -torch.inf), -1)
    expected = attention.o_proj((weights @ v).transpose(1, 2).flatten(2))
    actual = attention(hidden)[0]
    torch.testing.assert_close(actual, expected, atol=1e-10, rtol=1e-10)
    parameters = [hidden, *attention.parameters()]
    direction = torch.randn_like(expected)
    for ours, theirs in zip(
        torch.autograd.grad((actual * direction).sum(), parameters),
        torch.autograd.grad((expected * direction).sum(), parameters),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-9)


def test_no_global_tokens_by_a_call() -> None:
    model = hea.SparseTransformerModel(hea.SparseTransformerConfig.longformer_char_lm(**TINY))
    ids = torch.randint(3, 60, (1, 9))
    with pytest.raises(hea.InputError, match="global_attention_mask"):
        model(ids, global_attention_mask=torch.ones_like(ids))


def distances_made(pattern: Pattern, tokens: int, **fields: Any) -> list[tuple[int, ...]]:
    """Return the shapes of all scores of distances that one layer makes, [B, H, T, distances]."""
    config = hea.SparseTransformerConfig.longformer_char_lm(
        **{**TINY, "num_hidden_layers": 1, "attention_pattern": pattern, **fields}
    )
    attention = hea.SparseTransformerModel(config).eval().layers[0].self_attn
    shapes = []
    attention.relative.register_forward_hook(lambda *call: shapes.extend(term.values.shape for term in call[-1][1]))
    attention(torch.randn(2, tokens, TINY["hidden_size"]))
    return [tuple(shape) for shape in shapes]


def test_no_more_distances_than_there_are_keys() -> None:
    assert distances_made(Band(60, 0), 5) == [(2, 4, 5, 5)]
    assert distances_made(Band(60, 60), 5, is_causal=False) == [(2, 4, 5, 9)]
    assert distances_made(Band(3, 0), 20) == [(2, 4, 20, 4)]
    assert distances_made(Band(3, 0), 1) == [(2, 4, 1, 1)]


def test_no_head_makes_the_distances_of_another() -> None:
    assert distances_made(PerHead([Band(3, 0)] * 3 + [Dilated(12, 0, 4)]), 20) == [(2, 3, 20, 4), (2, 1, 20, 13)]


@pytest.mark.parametrize(
    ("reach", "num_keys", "expected"),
    [((-9, 9), 4, (-3, 3)), ((5, 9), 4, (5, 5)), ((-9, -5), 4, (-5, -5)), ((0, 9), 100, (0, 9)), ((0, 9), 1, (0, 0))],
)
def test_reach_within_the_keys(reach: tuple[int, int], num_keys: int, expected: tuple[int, int]) -> None:
    assert within(Distance(*reach), num_keys) == Distance(*expected)


def test_start_values_are_random() -> None:
    model = hea.SparseTransformerModel(hea.SparseTransformerConfig.longformer_char_lm(**TINY))
    assert model.layers[0].self_attn.relative.content_bias.std() > 0
