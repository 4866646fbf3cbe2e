"""Collaborative heads and reused weights equal their formulas, with gradients, and cache what they read with."""

from typing import Any

import pytest
import torch
from models.compressed_transformer.softmax_heads import readable, states_of
from models.compressed_transformer.tiny_models import build, random_ids
from models_cases import TINY, TOLERANCE, checkpoint_activations
from torch import Tensor

import hf_efficient_attn as hea
from hf_efficient_attn.integration.forward_context import CACHE_ARGUMENT
from hf_efficient_attn.models.compressed_transformer.mechanism import PassedStates
from hf_efficient_attn.patterns import Band

REUSED: dict[str, dict[str, Any]] = {
    "pattern": {"mechanism": ["pattern", "reused_weights", "reused_weights"], "num_key_value_heads": 2},
    "residual": {"mechanism": ["residual_scores", "residual_scores", "reused_weights"]},
    "collaborative": {"mechanism": ["pattern", "collaborative_heads", "reused_weights"], "shared_key_width": 9},
}


@pytest.mark.parametrize("width", [None, 5, 12])
@pytest.mark.parametrize("reach", [None, 3])
@pytest.mark.parametrize("is_causal", [False, True])
def test_heads_weigh_shared_queries_and_keys(is_causal: bool, reach: int | None, width: int | None) -> None:
    pattern = None if reach is None else Band(reach, reach)
    fields = {"is_causal": is_causal, "attention_pattern": pattern, "shared_key_width": width}
    attention = build("AutoModel", mechanism="collaborative_heads", **fields).double().layers[0].self_attn
    text = torch.randn(9, 32, dtype=torch.float64, requires_grad=True)
    query, key, value = (
        text @ project.weight.T + project.bias for project in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    assert query.shape[1] == key.shape[1] == (width or 32)
    heads = []
    for mix, own in zip(attention.mixing, value.split(8, 1), strict=True):
        scores = (query @ torch.diag(mix) @ key.T / 8**0.5).masked_fill(~readable(9, is_causal, reach), -torch.inf)
        heads.append(scores.softmax(-1) @ own)
    expected = torch.cat(heads, 1) @ attention.o_proj.weight.T + attention.o_proj.bias
    found = attention(text[None])[0][0]
    torch.testing.assert_close(found, expected, atol=1e-11, rtol=1e-9)
    weight = torch.randn(9, 32, dtype=torch.float64)
    given = [text, attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight, attention.mixing]
    slopes = [torch.autograd.grad((each * weight).sum(), given) for each in (found, expected)]
    for own, wanted in zip(*slopes, strict=True):
        torch.testing.assert_close(own, wanted, atol=1e-9, rtol=1e-8)


@torch.no_grad()
def test_collaborative_heads_start_as_ordinary_ones() -> None:
    full = build("AutoModel", mechanism="pattern")
    own = hea.CompressedTransformerModel(hea.CompressedTransformerConfig(**TINY, mechanism="collaborative_heads"))
    missing = own.load_state_dict(full.state_dict(), strict=False).missing_keys
    assert all(name.endswith("mixing") for name in missing)
    ids = random_ids(2, 9)
    expected = full(ids).last_hidden_state
    torch.testing.assert_close(own.eval()(ids).last_hidden_state, expected, atol=TOLERANCE, rtol=TOLERANCE)
    fewer = hea.CompressedTransformerConfig(**TINY, mechanism="collaborative_heads", shared_key_width=6)
    mixing = hea.CompressedTransformerModel(fewer).layers[0].self_attn.mixing
    # every head has a number, and every number a head
    assert mixing.sum(0).tolist() == [1] * 6
    assert sorted(mixing.sum(1).tolist()) == [1, 1, 2, 2]


@pytest.mark.parametrize("is_causal", [False, True])
def test_layers_read_with_the_weights_of_the_layer_below(is_causal: bool) -> None:
    """And by its pattern; values, and what is made of them, are their own."""
    fields = {"attention_pattern": [Band(2, 2), None], "is_causal": is_causal}
    model = build("AutoModel", mechanism=["pattern", "reused_weights"], **fields).double()
    below, above = (layer.self_attn for layer in model.layers)
    assert not any("q_proj" in name or "k_proj" in name for name, _ in above.named_parameters())
    texts = [torch.randn(9, 32, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    passed = PassedStates()
    found = [each(text[None], passed_states=passed)[0][0] for each, text in zip((below, above), texts, strict=True)][1]
    heads = []
    own = (texts[1] @ above.v_proj.weight.T + above.v_proj.bias).split(8, 1)
    for query, key, value in zip(*states_of(below, texts[0])[:2], own, strict=True):
        scores = (query @ key.T / 8**0.5).masked_fill(~readable(9, is_causal, 2), -torch.inf)
        heads.append(scores.softmax(-1) @ value)
    expected = torch.cat(heads, 1) @ above.o_proj.weight.T + above.o_proj.bias
    torch.testing.assert_close(found, expected, atol=1e-11, rtol=1e-9)
    weight, given = torch.randn(9, 32, dtype=torch.float64), [*texts, below.k_proj.weight, above.v_proj.weight]
    slopes = [torch.autograd.grad((each * weight).sum(), given) for each in (found, expected)]
    for mine, wanted in zip(*slopes, strict=True):
        torch.testing.assert_close(mine, wanted, atol=1e-9, rtol=1e-8)


@pytest.mark.filterwarnings("ignore:output_attentions=True")
@pytest.mark.parametrize("below", REUSED)
@torch.no_grad()
def test_weights_are_those_of_any_layer_that_has_some(below: str) -> None:
    model = build("AutoModel", num_hidden_layers=3, attention_pattern=Band(3, 1), **REUSED[below])
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[0, :4] = 0
    weights = model(random_ids(2, 11), attention_mask=mask, output_attentions=True).attentions
    torch.testing.assert_close(weights[2], weights[1])


@pytest.mark.parametrize("below", REUSED)
@torch.no_grad()
def test_caches_hold_what_layers_keep(below: str) -> None:
    """In steps of several sizes; beams take rows along."""
    fields = {**REUSED[below], "num_hidden_layers": 3, "is_causal": True, "attention_pattern": Band(6, 0)}
    model, ids, parts, cache = build(**fields), random_ids(2, 14), [], None
    full = model(ids, use_cache=False).logits
    for part in ids.split([5, 1, 1, 7], 1):
        out = model(part, **{CACHE_ARGUMENT: cache}, use_cache=True)
        cache, parts = out.past_key_values, [*parts, out.logits]
    torch.testing.assert_close(torch.cat(parts, 1), full, atol=TOLERANCE, rtol=TOLERANCE)
    for index, layer in enumerate(cache.layers):
        assert layer.keys.numel() + layer.values.numel() == 2 * model.config.cached_numbers(index, 14)
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "num_beams": 3}
    expected = model.generate(ids, use_cache=False, **options)
    for kind in ("dynamic", "static"):
        assert torch.equal(model.generate(ids, cache_implementation=kind, **options), expected)
    kept = hea.PatternCache(model.config)
    assert torch.equal(model.generate(ids, **{CACHE_ARGUMENT: kept}, **options), expected)
    assert {layer.keys.shape[2] for layer in kept.layers} == {6}


def gradients(checkpointing: dict[str, bool] | None) -> dict[str, Tensor]:
    """Return gradients of a model that reuses weights, of which layers are computed again in the backward pass."""
    fields = {"embedding_dropout": 0.0, "hidden_dropout": 0.0}
    model = build("AutoModel", mechanism=["pattern", "reused_weights"], **fields).double().train()
    if checkpointing is not None:
        checkpoint_activations(model, checkpointing)
    model(random_ids(2, 9)).last_hidden_state.square().sum().backward()
    return {name: each.grad for name, each in model.named_parameters()}


def test_gradients_of_reused_weights_survive_checkpointing_or_it_is_refused() -> None:
    expected, found = gradients(None), gradients({"use_reentrant": False})
    for name, each in expected.items():
        torch.testing.assert_close(found[name], each, atol=1e-10, rtol=1e-8)
    with pytest.raises(hea.UnsupportedBackendError, match="use_reentrant=True"):
        gradients({"use_reentrant": True})
