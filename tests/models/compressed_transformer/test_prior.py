"""Priors by distance, average attention, talking heads and shared keys equal their formulas, with gradients."""

from typing import Any

import pytest
import torch
from models.compressed_transformer.tiny_models import build, random_ids
from models_cases import TINY
from torch import Tensor

import hf_efficient_attn as hea
from hf_efficient_attn.models.compressed_transformer.residual_scores import PassedScores
from hf_efficient_attn.patterns import Band


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


@pytest.mark.parametrize("groups", [None, 2, 1])
@pytest.mark.parametrize("reach", [None, 3])
@pytest.mark.parametrize("is_trained", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_prior_is_added_to_scores(is_causal: bool, is_trained: bool, reach: int | None, groups: int | None) -> None:
    fields = {"prior_is_trained": is_trained, "prior_width_tokens": 2.5, "num_key_value_heads": groups}
    pattern = None if reach is None else Band(reach, reach)
    model = build("AutoModel", mechanism="prior", is_causal=is_causal, attention_pattern=pattern, **fields).double()
    attention, text = model.layers[0].self_attn, torch.randn(9, 32, dtype=torch.float64, requires_grad=True)
    read, heads = readable(9, is_causal, reach), []
    squares = (torch.arange(9)[:, None] - torch.arange(9)).square().double()
    for head, (query, key, value) in enumerate(zip(*states_of(attention, text), strict=True)):
        prior = -squares / (2 * 2.5**2)
        if is_trained:
            weight, bias = attention.prior_weight[head].abs(), -attention.prior_bias[head].abs()
            prior = -(weight * squares + bias).abs()
        scores = (query @ key.T / 8**0.5 + prior).masked_fill(~read, -torch.inf)
        heads.append(scores.softmax(-1) @ value)
    others = [attention.q_proj.weight, attention.k_proj.weight]
    others += [attention.prior_weight, attention.prior_bias] if is_trained else []
    compare(model, text, torch.cat(heads, 1), others, is_causal)


@pytest.mark.parametrize("groups", [None, 2])
@pytest.mark.parametrize("reach", [None, 3])
@pytest.mark.parametrize("is_causal", [False, True])
def test_heads_talk_before_and_behind_the_softmax(is_causal: bool, reach: int | None, groups: int | None) -> None:
    pattern = None if reach is None else Band(reach, reach)
    fields = {"attention_pattern": pattern, "num_key_value_heads": groups}
    model = build("AutoModel", mechanism="talking_heads", is_causal=is_causal, **fields).double()
    attention, text = model.layers[0].self_attn, torch.randn(9, 32, dtype=torch.float64, requires_grad=True)
    read = readable(9, is_causal, reach)
    queries, keys, values = states_of(attention, text)
    scores = [query @ key.T / 8**0.5 for query, key in zip(queries, keys, strict=True)]
    weights = []
    for row in attention.score_map:
        mixed = sum(number * each for number, each in zip(row, scores, strict=True))
        weights.append(mixed.masked_fill(~read, -torch.inf).softmax(-1))
    heads = []
    for row, value in zip(attention.weight_map, values, strict=True):
        mixed = sum(number * each for number, each in zip(row, weights, strict=True))
        heads.append(mixed @ value)
    others = [attention.q_proj.weight, attention.score_map, attention.weight_map]
    compare(model, text, torch.cat(heads, 1), others, is_causal)


@pytest.mark.parametrize("is_causal", [False, True])
def test_scores_of_the_layer_below_are_added(is_causal: bool) -> None:
    """Through a layer of another mechanism, and through pairs that only the layer above reads."""
    mechanisms = ["residual_scores", "linear", "residual_scores"]
    fields = {"attention_pattern": [Band(2, 2), None, None], "num_hidden_layers": 3}
    model = build("AutoModel", mechanism=mechanisms, is_causal=is_causal, **fields).double()
    texts = [torch.randn(9, 32, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    passed = PassedScores()
    total, below = [], [torch.zeros((), dtype=torch.float64)] * 4
    for layer, text, reach in ((0, texts[0], 2), (2, texts[1], None)):
        attention, heads = model.layers[layer].self_attn, []
        found = attention(text[None], passed_scores=passed)[0][0]
        for head, (query, key, value) in enumerate(zip(*states_of(attention, text), strict=True)):
            below[head] = below[head] + query @ key.T / 8**0.5
            read = below[head].masked_fill(~readable(9, is_causal, reach), -torch.inf)
            heads.append(read.softmax(-1) @ value)
        expected = torch.cat(heads, 1) @ attention.o_proj.weight.T + attention.o_proj.bias
        torch.testing.assert_close(found, expected, atol=1e-11, rtol=1e-9)
        total.append((found, expected))
    weight = torch.randn(9, 32, dtype=torch.float64)
    given = [*texts, model.layers[0].self_attn.q_proj.weight, model.layers[2].self_attn.k_proj.weight]
    slopes = [torch.autograd.grad((each * weight).sum(), given) for each in total[1]]
    for own, wanted in zip(*slopes, strict=True):
        torch.testing.assert_close(own, wanted, atol=1e-9, rtol=1e-8)


@torch.no_grad()
def test_heads_that_do_not_talk_yet_are_those_of_a_pattern() -> None:
    full = build("AutoModel", mechanism="pattern")
    torch.manual_seed(0)
    fields = {**full.config.to_dict(), "mechanism": "talking_heads"}
    talking = hea.CompressedTransformerModel(hea.CompressedTransformerConfig.from_dict(fields)).eval()
    missing = talking.load_state_dict(full.state_dict(), strict=False).missing_keys
    assert all(name.endswith(("score_map", "weight_map")) for name in missing)
    ids = random_ids(2, 9)
    torch.testing.assert_close(talking(ids).last_hidden_state, full(ids).last_hidden_state)


@pytest.mark.parametrize("is_causal", [False, True])
@torch.no_grad()
def test_average_attention_reads_all_tokens_alike(is_causal: bool) -> None:
    model = build("AutoModel", mechanism="linear", feature_map="constant", is_causal=is_causal, chunk_tokens=4).double()
    attention, text = model.layers[0].self_attn, torch.randn(1, 11, 32, dtype=torch.float64)
    values = attention.v_proj(text)[0]
    counts = torch.arange(1, 12).double().unsqueeze(1)
    expected = values.cumsum(0) / counts if is_causal else values.mean(0, keepdim=True).expand(11, -1)
    torch.testing.assert_close(attention.attend(text, None, False)[0][0], expected, atol=1e-6, rtol=1e-6)
    assert not any("q_proj" in name or "k_proj" in name for name, _ in model.named_parameters())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mechanism": "pattern", "num_key_value_heads": 3}, "must divide num_attention_heads=4"),
        (
            {"mechanism": ["pattern", "linear"], "num_key_value_heads": 2},
            "talking_heads can, and linear cannot",
        ),
        ({"mechanism": "prior", "prior_width_tokens": 0}, "must be at least 1"),
    ],
)
def test_what_no_layer_can_have_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(hea.ConfigurationError, match=message):
        hea.CompressedTransformerConfig(**{**TINY, **fields})
