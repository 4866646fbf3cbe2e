"""Heads that talk, share keys, add scores or reuse weights, and priors: formulas with gradients, memory, caches."""

from typing import Any

import pytest
import torch
from models.compressed_transformer.tiny_models import build, random_ids
from models.shared_checks import check_compiled_steps, decode, kept_bytes
from models_cases import TINY, TOLERANCE, checkpoint_activations
from torch import Tensor

import hf_efficient_attn as hea
from hf_efficient_attn.integration.forward_context import CACHE_ARGUMENT
from hf_efficient_attn.models.compressed_transformer import softmax_heads
from hf_efficient_attn.models.compressed_transformer.mechanism import PassedStates
from hf_efficient_attn.patterns import Band, PerHead


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


# of the softmax of weights that are returned
FLOAT32 = {"atol": 2e-6, "rtol": 1e-5}


@pytest.mark.parametrize("few_keys", [0, 512])
@pytest.mark.parametrize("groups", [None, 2])
@pytest.mark.parametrize("reach", [None, 3])
@pytest.mark.parametrize("is_causal", [False, True])
def test_heads_talk_before_and_behind_the_softmax(
    is_causal: bool, reach: int | None, groups: int | None, few_keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the scores of all pairs, and by the engine."""
    monkeypatch.setattr(softmax_heads, "FEW_KEYS", few_keys)
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
    sequences = [torch.randn(9, 32, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    passed = PassedStates()
    total, below = [], [torch.zeros((), dtype=torch.float64)] * 4
    for layer, text, reach in ((0, sequences[0], 2), (2, sequences[1], None)):
        attention, heads = model.layers[layer].self_attn, []
        found = attention(text[None], passed_states=passed)[0][0]
        for head, (query, key, value) in enumerate(zip(*states_of(attention, text), strict=True)):
            below[head] = below[head] + query @ key.T / 8**0.5
            read = below[head].masked_fill(~readable(9, is_causal, reach), -torch.inf)
            heads.append(read.softmax(-1) @ value)
        expected = torch.cat(heads, 1) @ attention.o_proj.weight.T + attention.o_proj.bias
        torch.testing.assert_close(found, expected, atol=1e-11, rtol=1e-9)
        total.append((found, expected))
    weight = torch.randn(9, 32, dtype=torch.float64)
    given = [*sequences, model.layers[0].self_attn.q_proj.weight, model.layers[2].self_attn.k_proj.weight]
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


@pytest.mark.filterwarnings("ignore:output_attentions=True")
@pytest.mark.parametrize("is_training", [False, True])
def test_both_ways_to_talk_compute_the_same(is_training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With patterns of single heads, padding and weights; in training, weights are dropped, and those are returned."""
    pattern = PerHead([Band(2, 2), Band(5, 0), Band(0, 3), Band(7, 7)])
    model = build("AutoModel", mechanism="talking_heads", attention_pattern=pattern, attention_dropout=0.4).double()
    model.train(is_training)
    mask, found = torch.ones(2, 12, dtype=torch.long), []
    mask[0, :5] = 0
    for few_keys in (0, 512):
        monkeypatch.setattr(softmax_heads, "FEW_KEYS", few_keys)
        torch.manual_seed(0)
        found.append(model(random_ids(2, 12), attention_mask=mask, output_attentions=True))
        without = model(random_ids(2, 12), attention_mask=mask)
        if not is_training:
            torch.testing.assert_close(without.last_hidden_state, found[-1].last_hidden_state, **FLOAT32)
    real = mask.bool()
    torch.testing.assert_close(found[0].last_hidden_state[real], found[1].last_hidden_state[real], **FLOAT32)
    for own, other in zip(found[0].attentions, found[1].attentions, strict=True):
        torch.testing.assert_close(own.transpose(1, 2)[real], other.transpose(1, 2)[real], **FLOAT32)


@pytest.mark.parametrize("few_keys", [0, 512])
def test_weights_of_the_softmax_are_dropped_before_heads_mix_them(
    few_keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dropout that leaves out half of the weights, and mixing that hands one head's weights to all."""
    monkeypatch.setattr(softmax_heads, "FEW_KEYS", few_keys)
    fields = {"attention_pattern": Band(8, 8), "attention_dropout": 0.5}
    attention = build("AutoModel", mechanism="talking_heads", **fields).double().layers[0].self_attn.train()
    with torch.no_grad():
        attention.weight_map.zero_()[:, 2] = 1
        attention.v_proj.weight.zero_()
        attention.v_proj.bias.fill_(1)
        attention.o_proj.weight.copy_(torch.eye(32))
        attention.o_proj.bias.zero_()
    text = torch.randn(1, 9, 32, dtype=torch.float64)
    first, second = (attention(text)[0].unflatten(-1, (4, 8))[..., 0] for _ in range(2))
    # all heads read what one reads, whose weights are left out by chance
    torch.testing.assert_close(first, first[..., :1].expand(-1, -1, 4))
    assert not torch.allclose(first, second)
    mean = torch.stack([attention(text)[0] for _ in range(400)]).mean()
    torch.testing.assert_close(mean, torch.ones_like(mean), atol=0.03, rtol=0)


def kept_numbers(mechanism: str, tokens: int) -> int:
    """Return how many numbers the backward pass of a model keeps."""
    fields = {"attention_pattern": Band(8, 8), "num_hidden_layers": 3, "max_position_embeddings": tokens}
    model = build("AutoModel", mechanism=mechanism, **fields)
    return kept_bytes(lambda: model(random_ids(1, tokens)).last_hidden_state) // 4


@pytest.mark.parametrize("mechanism", ["talking_heads", "residual_scores"])
def test_memory_grows_as_the_text_where_the_pattern_does(mechanism: str) -> None:
    short, long = kept_numbers(mechanism, 1024), kept_numbers(mechanism, 4096)
    assert long <= 4.1 * short
    # scores of all pairs of a layer would be four times this
    assert long < 4096**2


def gradients(checkpointing: dict[str, bool] | None) -> dict[str, Tensor]:
    """Return gradients of a model with residual scores, of which layers are computed again in the backward pass."""
    fields = {"embedding_dropout": 0.0, "hidden_dropout": 0.0, "num_hidden_layers": 3}
    model = build("AutoModel", mechanism=["residual_scores", "prior", "residual_scores"], **fields).double().train()
    if checkpointing is not None:
        checkpoint_activations(model, checkpointing)
    model(random_ids(2, 9)).last_hidden_state.square().sum().backward()
    return {name: each.grad for name, each in model.named_parameters()}


def test_gradients_of_passed_queries_survive_checkpointing_or_it_is_refused() -> None:
    expected, found = gradients(None), gradients({"use_reentrant": False})
    for name, each in expected.items():
        torch.testing.assert_close(found[name], each, atol=1e-10, rtol=1e-8)
    with pytest.raises(hea.UnsupportedBackendError, match="use_reentrant=True"):
        gradients({"use_reentrant": True})


@pytest.mark.parametrize("mechanism", ["talking_heads", "residual_scores"])
@torch.no_grad()
def test_tokens_are_decoded_by_the_engine(mechanism: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In steps of several sizes, from caches that grow and that do not."""
    monkeypatch.setattr(softmax_heads, "FEW_KEYS", 0)
    fields = {"attention_pattern": Band(4, 0), "is_causal": True, "num_hidden_layers": 3, "num_key_value_heads": 2}
    model, ids = build(mechanism=mechanism, **fields), random_ids(2, 14)
    full = model(ids, use_cache=False).logits
    found, cache = decode(model, ids, [5, 1, 1, 7])
    torch.testing.assert_close(found, full, atol=TOLERANCE, rtol=TOLERANCE)
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, use_cache=False, **options)
    for kind in ("dynamic", "static"):
        assert torch.equal(model.generate(ids, cache_implementation=kind, **options), expected)
    kept = hea.PatternCache(model.config)
    assert torch.equal(model.generate(ids, **{CACHE_ARGUMENT: kept}, **options), expected)
    assert {layer.keys.shape[2] for layer in kept.layers} == {4}


@pytest.mark.thorough
def test_compiled_heads_talk_in_a_static_cache() -> None:
    """They compute all scores, whatever is asked for."""
    model = build(mechanism="talking_heads", is_causal=True, num_hidden_layers=1)
    check_compiled_steps(model, random_ids(2, 9), need_weights=False)


def test_keys_of_other_tokens_are_refused() -> None:
    passed = PassedStates()
    for layer, tokens in ((0, 5), (1, 7)):
        passed.keep(layer, torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, tokens, 4))
    with pytest.raises(hea.InputError, match="5 in layer 0, 7 in layer 1, and 7 in this layer"):
        passed.joined([0, 1], torch.zeros(1, 1, 7, 4))


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
    sequences = [torch.randn(9, 32, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    passed = PassedStates()
    found = [
        each(text[None], passed_states=passed)[0][0] for each, text in zip((below, above), sequences, strict=True)
    ][1]
    heads = []
    own = (sequences[1] @ above.v_proj.weight.T + above.v_proj.bias).split(8, 1)
    for query, key, value in zip(*states_of(below, sequences[0])[:2], own, strict=True):
        scores = (query @ key.T / 8**0.5).masked_fill(~readable(9, is_causal, 2), -torch.inf)
        heads.append(scores.softmax(-1) @ value)
    expected = torch.cat(heads, 1) @ above.o_proj.weight.T + above.o_proj.bias
    torch.testing.assert_close(found, expected, atol=1e-11, rtol=1e-9)
    weight, given = torch.randn(9, 32, dtype=torch.float64), [*sequences, below.k_proj.weight, above.v_proj.weight]
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
    """In steps of several sizes; beams take rows along, in caches that do not grow."""
    fields = {**REUSED[below], "num_hidden_layers": 3, "is_causal": True, "attention_pattern": Band(6, 0)}
    model, ids = build(**fields), random_ids(2, 14)
    full = model(ids, use_cache=False).logits
    found, cache = decode(model, ids, [5, 1, 1, 7])
    torch.testing.assert_close(found, full, atol=TOLERANCE, rtol=TOLERANCE)
    for index, layer in enumerate(cache.layers):
        assert layer.keys.numel() + layer.values.numel() == 2 * model.config.cached_numbers(index, 14)
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "num_beams": 3}
    expected = model.generate(ids, use_cache=False, **options)
    assert torch.equal(model.generate(ids, cache_implementation="static", **options), expected)
    kept = hea.PatternCache(model.config)
    assert torch.equal(model.generate(ids, **{CACHE_ARGUMENT: kept}, **options), expected)
    assert {layer.keys.shape[2] for layer in kept.layers} == {6}


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


@pytest.mark.parametrize("is_causal", [False, True])
@torch.no_grad()
def test_average_attention_attends_to_all_tokens_alike(is_causal: bool) -> None:
    model = build("AutoModel", mechanism="linear", feature_map="constant", is_causal=is_causal, chunk_tokens=4).double()
    attention, text = model.layers[0].self_attn, torch.randn(1, 11, 32, dtype=torch.float64)
    values = attention.v_proj(text)[0]
    counts = torch.arange(1, 12).double().unsqueeze(1)
    expected = values.cumsum(0) / counts if is_causal else values.mean(0, keepdim=True).expand(11, -1)
    torch.testing.assert_close(attention.attend(text, None, False)[0][0], expected, atol=1e-6, rtol=1e-6)
    assert not any("q_proj" in name or "k_proj" in name for name, _ in model.named_parameters())


def test_a_prior_without_a_pattern_keeps_no_number_for_each_pair() -> None:
    model, sizes = build("AutoModel", mechanism="prior", max_position_embeddings=400), []
    with (
        hea.use_backend("blocked"),
        torch.autograd.graph.saved_tensors_hooks(lambda kept: sizes.append(kept.numel()) or kept, lambda kept: kept),
    ):
        model.train()(torch.randint(1, 60, (1, 400))).last_hidden_state.sum().backward()
    assert max(sizes) < 400 * 400
