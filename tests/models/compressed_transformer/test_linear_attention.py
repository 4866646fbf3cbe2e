"""Linear attention equals its dense and recurrent forms; random features are unbiased, and redrawn."""

import copy
from typing import Any

import peft
import pytest
import torch
import transformers
from models.compressed_transformer.tiny_models import build, random_ids
from models.shared_checks import kept_bytes
from models_cases import TOLERANCE, trainer_arguments
from torch import Tensor

import hf_efficient_attn as hea
from hf_efficient_attn.integration.forward_context import CACHE_ARGUMENT
from hf_efficient_attn.models.mechanisms.linear import PositiveRandomFeatures, causal_sums
from hf_efficient_attn.models.mechanisms.state_cache import StateLayer, attach_states

MAPS: dict[str, dict[str, Any]] = {
    "elu": {},
    "positive_random": {"feature_map": "positive_random", "num_features": 11},
}


def linear(how: str, **fields: Any) -> Any:
    return build("AutoModel", mechanism="linear", **MAPS[how], **fields).double()


def features(attention: Any, states: Tensor, is_query: bool) -> Tensor:
    """Return φ, by its formula."""
    if not hasattr(attention.features, "vectors"):
        return torch.where(states > 0, states + 1, states.exp())
    vectors = attention.features.vectors.to(states)
    states = states / states.shape[-1] ** 0.25
    squares = (states * states).sum(-1)
    exponents = torch.stack([(states * each).sum(-1) - squares / 2 for each in vectors], -1)
    if is_query:
        exponents = exponents - exponents.max(-1, keepdim=True).values.detach()
    return exponents.exp() / len(vectors) ** 0.5


def epsilon(attention: Any) -> float:
    """Return what is added to the sum of weights; random features need nothing."""
    return 0.0 if hasattr(attention.features, "vectors") else attention.config.normalizer_epsilon


def dense(attention: Any, text: Tensor, is_causal: bool) -> Tensor:
    """Return the output before the last map, from the weights of all pairs: [B, T, hidden_size] → the same."""
    query, key, value = (
        project(text).unflatten(-1, (4, 8)).transpose(1, 2)
        for project in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    weights = features(attention, query, True) @ features(attention, key, False).mT
    weights = weights.tril() if is_causal else weights
    out = weights @ value / (weights.sum(-1, keepdim=True) + epsilon(attention))
    return out.transpose(1, 2).flatten(2)


def recurrent(attention: Any, text: Tensor) -> Tensor:
    """Return the same of causal attention, token by token from a state."""
    state: Any = 0.0
    normalizer: Any = 0.0
    out = []
    for token in text.split(1, 1):
        query, key, value = (
            project(token).unflatten(-1, (4, 8))[:, 0]
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        query, key = features(attention, query, True), features(attention, key, False)
        state, normalizer = state + key.unsqueeze(-1) * value.unsqueeze(-2), normalizer + key
        read = (query.unsqueeze(-1) * state).sum(-2)
        out.append(read / ((query * normalizer).sum(-1, keepdim=True) + epsilon(attention)))
    return torch.stack(out, 1).flatten(2)


@pytest.mark.parametrize("tokens", [1, 7, 8, 21])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("how", MAPS)
def test_outputs_and_gradients_are_those_of_the_dense_and_recurrent_forms(
    how: str, is_causal: bool, tokens: int
) -> None:
    attention = linear(how, is_causal=is_causal, chunk_tokens=4).layers[0].self_attn
    text = torch.randn(2, tokens, 32, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, tokens, 32, dtype=torch.float64)
    given = [text, attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
    found = attention.attend(text, None, False)[0]
    others = [dense(attention, text, is_causal)] + ([recurrent(attention, text)] if is_causal else [])
    slopes = torch.autograd.grad((found * weight).sum(), given)
    for other in others:
        torch.testing.assert_close(found, other, atol=1e-11, rtol=1e-9)
        expected = torch.autograd.grad((other * weight).sum(), given)
        for own, wanted in zip(slopes, expected, strict=True):
            torch.testing.assert_close(own, wanted, atol=1e-9, rtol=1e-8)


@pytest.mark.filterwarnings("ignore:output_attentions=True")
@pytest.mark.parametrize("is_causal", [False, True])
@torch.no_grad()
def test_weights_are_those_of_which_outputs_are_made(is_causal: bool) -> None:
    model = linear("elu", is_causal=is_causal)
    attention, text = model.layers[0].self_attn, torch.randn(2, 9, 32, dtype=torch.float64)
    out, weights = attention.attend(text, None, True)
    value = attention.heads(attention.v_proj(text))
    torch.testing.assert_close((weights @ value).transpose(1, 2).flatten(2), out)
    assert (weights[:, :, 0, 1:].count_nonzero() == 0) == is_causal
    if is_causal:
        cache = model(random_ids(1, 4), use_cache=True).past_key_values
        with pytest.raises(hea.UnsupportedBackendError, match="keeps only sums over cached tokens"):
            model(random_ids(1, 1), **{CACHE_ARGUMENT: cache}, output_attentions=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("how", MAPS)
@torch.no_grad()
def test_sums_of_many_large_terms_do_not_overflow(how: str, dtype: torch.dtype) -> None:
    """Of 3,000 keys of which a sum in float16 would be infinite, and in bfloat16 stand still."""
    model = linear(how, is_causal=True, max_position_embeddings=4096).to(torch.float32)
    attention = model.layers[0].self_attn
    text = torch.randn(1, 3000, 32) * 4
    expected = attention.attend(text, None, False)[0]
    found = model.to(dtype).layers[0].self_attn.attend(text.to(dtype), None, False)[0]
    assert found.dtype == dtype
    assert found.isfinite().all()
    assert (found - expected).norm() < 0.1 * expected.norm()


@torch.no_grad()
def test_state_is_as_large_after_any_number_of_tokens_and_goes_on() -> None:
    model = build(mechanism="linear", is_causal=True)
    ids, sizes = random_ids(2, 20), []
    full = model(ids, use_cache=False).logits
    cache, parts = None, []
    for part in ids.split([6, 1, 13], 1):
        out = model(part, **{CACHE_ARGUMENT: cache}, use_cache=True)
        cache, parts = out.past_key_values, [*parts, out.logits]
        sizes.append(sum(layer.keys.numel() for layer in cache.layers))
    torch.testing.assert_close(torch.cat(parts, 1), full, atol=TOLERANCE, rtol=TOLERANCE)
    assert sizes == [2 * 2 * 4 * 8 * 9] * 3
    assert cache.get_seq_length() == 20
    cache.reorder_cache(torch.tensor([1, 1]))
    assert torch.equal(cache.layers[0].keys[0], cache.layers[0].keys[1])
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 3, 1]))
    assert cache.layers[1].keys.shape[0] == 3
    cache.reset()
    assert cache.get_seq_length() == 0
    torch.testing.assert_close(model(ids, **{CACHE_ARGUMENT: cache}).logits, full, atol=TOLERANCE, rtol=TOLERANCE)


@torch.no_grad()
def test_caches_of_other_kinds_are_refused() -> None:
    model, ids = build(mechanism="linear", is_causal=True), random_ids(1, 4)
    sliding = transformers.cache_utils.DynamicSlidingWindowLayer(4)
    with pytest.raises(hea.UnsupportedBackendError, match="Layer 0 keeps sums .* has a DynamicSlidingWindowLayer"):
        model(ids, **{CACHE_ARGUMENT: transformers.Cache(layers=[sliding, transformers.cache_utils.DynamicLayer()])})


def saved_numbers(tokens: int) -> int:
    """Return how many numbers the backward pass of causal sums keeps."""
    query, key, value = (torch.randn(1, 1, tokens, width, requires_grad=True) for width in (8, 8, 9))
    return kept_bytes(lambda: causal_sums(query, key, value, None, 16)) // 4


def test_memory_of_the_backward_pass_grows_as_the_text() -> None:
    short, long = saved_numbers(512), saved_numbers(2048)
    assert long <= 4.05 * short
    # a state for every token would be this large
    assert long < 2048 * 8 * 9


@torch.no_grad()
def test_caches_of_which_a_part_was_cropped_are_refused() -> None:
    """Layers of softmax have forgotten tokens before a linear layer refuses to."""
    model, ids = build(mechanism=["pattern", "linear"], is_causal=True), random_ids(2, 13)
    cache = model(ids, use_cache=True).past_key_values
    with pytest.raises(hea.UnsupportedBackendError, match="cannot be cropped"):
        cache.crop(-3)
    with pytest.raises(hea.InputError, match="Layer 0 of this cache holds 10 tokens, but layer 1 holds sums over 13"):
        model(ids[:, -3:], past_key_values=cache)


@torch.no_grad()
def test_random_features_are_orthogonal_and_unbiased() -> None:
    """The mean over draws of φ(q)·φ(k) is exp(q·k / √D)."""
    config = build(mechanism="linear", feature_map="positive_random", num_features=24).config
    drawn = PositiveRandomFeatures(config, 0)
    drawn.initialize()
    block = drawn.vectors[:8] / drawn.vectors[:8].norm(dim=1, keepdim=True)
    torch.testing.assert_close(block @ block.T, torch.eye(8), atol=1e-5, rtol=0)
    query, key = torch.randn(2, 1, 1, 5, 8, generator=torch.Generator().manual_seed(0)).double() / 2
    total = torch.zeros(5, 5, dtype=torch.float64)
    count = 2000
    for number in range(count):
        drawn.redraw(number)
        queries, keys = (features * exponent.exp().unsqueeze(-1) for features, exponent in (drawn(query), drawn(key)))
        total += (queries @ keys.mT)[0, 0] / count
    expected = (query[0, 0] @ key[0, 0].T / 8**0.5).exp()
    assert ((total - expected).abs() / expected).max() < 0.03
    drawn.redraw(3)
    other = PositiveRandomFeatures(config, 0)
    other.redraw(3)
    assert torch.equal(drawn.vectors, other.vectors)
    another = PositiveRandomFeatures(config, 1)
    another.redraw(3)
    assert not torch.equal(drawn.vectors, another.vectors)


def performer(std: float, is_causal: bool, tokens: int = 40) -> tuple[Any, Tensor]:
    """Return attention with a head of 64 and random features, and a text, so that queries and keys have this std.

    Some tokens have keys ten times as short, the first ones and others, so that which key is largest changes.
    """
    fields = {"hidden_size": 128, "num_attention_heads": 2, "is_causal": is_causal, "chunk_tokens": 8}
    model = build("AutoModel", mechanism="linear", feature_map="positive_random", num_features=256, **fields)
    attention, numbers = model.layers[0].self_attn, torch.Generator().manual_seed(1)
    for project in (attention.q_proj, attention.k_proj, attention.v_proj):
        torch.nn.init.normal_(project.weight, std=128**-0.5, generator=numbers)
        torch.nn.init.zeros_(project.bias)
    text = std * torch.randn(1, tokens, 128, generator=numbers)
    text[:, [0, 1, 13, 14, 30]] /= 10
    return attention, text


def by_logarithms(attention: Any, text: Tensor) -> Tensor:
    """Return the output of random features before the last map from logarithms of the weights, in float64."""
    query, key, value = (
        project(text).unflatten(-1, (2, 64)).transpose(1, 2)
        for project in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    exponents = []
    for states in (query / 64**0.25, key / 64**0.25):
        exponents.append(states @ attention.features.vectors.to(states).mT - states.square().sum(-1, keepdim=True) / 2)
    pairs = torch.logsumexp(exponents[0].unsqueeze(3) + exponents[1].unsqueeze(2), -1)
    if attention.is_causal:
        pairs = pairs.masked_fill(~torch.ones(pairs.shape[2:], dtype=torch.bool).tril(), -torch.inf)
    return (pairs.softmax(-1) @ value).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("std", [0.5, 3, 8])
@pytest.mark.parametrize("is_causal", [False, True])
def test_random_features_of_long_keys_do_not_vanish(is_causal: bool, std: float) -> None:
    """In float32, whose numbers exp(−|k|² / 2) of most keys would not be added to an epsilon of 1e-6."""
    attention, text = performer(std, is_causal)
    text.requires_grad_()
    wide = copy.deepcopy(attention).double()
    weight = torch.randn(1, 40, 128, generator=torch.Generator().manual_seed(2))
    found, expected = attention.attend(text, None, False)[0], by_logarithms(wide, text.double())
    assert (found - expected).norm() < 1e-4 * expected.norm()
    slopes = [torch.autograd.grad((each * weight).sum(), [text])[0] for each in (found, expected)]
    assert (slopes[0] - slopes[1]).norm() < 1e-3 * slopes[1].norm()


@pytest.mark.filterwarnings("ignore:output_attentions=True")
@pytest.mark.parametrize("std", [0.5, 8])
@torch.no_grad()
def test_sums_of_long_keys_go_on_from_any_state(std: float) -> None:
    attention, text = performer(std, is_causal=True)
    expected = attention.attend(text, None, False)[0]
    weights = attention.attend(text, None, True)[1]
    value = attention.heads(attention.v_proj(text))
    torch.testing.assert_close((weights @ value).transpose(1, 2).flatten(2), expected, atol=1e-4, rtol=1e-4)
    for sizes in ([1] * 40, [1, 2, 30, 7], [20, 20]):
        cache, parts = transformers.DynamicCache(), []
        attach_states(cache, 1, {0: StateLayer})
        for part in text.split(sizes, 1):
            parts.append(attention.attend(part, None, False, cache=cache)[0])
        torch.testing.assert_close(torch.cat(parts, 1), expected, atol=1e-4, rtol=1e-4)
        kept = cache.layers[0].keys.numel() + cache.layers[0].values.numel()
        assert kept == attention.config.cached_numbers(0, 40)


# peft asks models for an attribute that transformers has renamed
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_features_are_redrawn_in_training(tmp_path: Any) -> None:
    config = build(mechanism="linear", feature_map="positive_random").config
    config.feature_redraw_steps = 2
    model = hea.CompressedTransformerForMaskedLM(config)
    # as an earlier training leaves them
    model.redraw_features(4)
    features = model.model.layers[0].self_attn.features
    first = features.vectors.clone()
    rows = [{"input_ids": row, "labels": row} for row in random_ids(6, 5)]
    arguments = trainer_arguments(tmp_path, per_device_train_batch_size=2, max_steps=3)
    trainer = transformers.Trainer(model, arguments, train_dataset=rows, callbacks=[hea.RedrawFeaturesCallback()])
    seen = []
    model.register_forward_pre_hook(lambda *_: seen.append(features.vectors.clone()))
    trainer.train()
    model.redraw_features(1)
    second = features.vectors.clone()
    assert not torch.equal(first, second)
    assert [[torch.equal(each, draw) for draw in (first, second)] for each in seen] == [
        [True, False], [True, False], [False, True],
    ]  # fmt: skip
    trainer.model = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", r=1))
    with pytest.raises(hea.InputError, match="an adapter is saved without them"):
        trainer.train()
    trainer.model, config.feature_redraw_steps = model, None
    with pytest.raises(hea.InputError, match="no features are redrawn"):
        trainer.train()
