"""Random features are unbiased, give softmax attention without an epsilon for keys of any length, and are redrawn."""

import copy
from typing import Any

import peft
import pytest
import torch
import transformers
from models.compressed_transformer.tiny_models import build, random_ids
from torch import Tensor

import hf_efficient_attn as hea
from hf_efficient_attn.models.mechanisms.linear import PositiveRandomFeatures
from hf_efficient_attn.models.mechanisms.state_cache import StateLayer, attach_states


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


@pytest.mark.parametrize("std", [0.5, 2, 3, 4, 8])
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
@pytest.mark.parametrize("std", [0.5, 4, 8])
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


@torch.no_grad()
def test_many_random_features_come_near_softmax() -> None:
    model = build("AutoModel", mechanism="linear", feature_map="positive_random", num_features=20_000)
    for layer in model.layers:
        # of long queries and keys, most features say nothing
        for project in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            project.weight.mul_(0.3)
            project.bias.mul_(0.3)
    full = build("AutoModel", mechanism="pattern")
    full.load_state_dict({name: each for name, each in model.state_dict().items() if "features" not in name})
    ids = random_ids(2, 12)
    torch.testing.assert_close(model(ids).last_hidden_state, full(ids).last_hidden_state, atol=0.05, rtol=0.05)


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
    arguments = transformers.TrainingArguments(
        tmp_path, per_device_train_batch_size=2, max_steps=3, report_to=[], save_strategy="no", use_cpu=True,
        disable_tqdm=True,
    )  # fmt: skip
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
    with pytest.raises(hea.InputError, match="so that nothing is redrawn"):
        trainer.train()
