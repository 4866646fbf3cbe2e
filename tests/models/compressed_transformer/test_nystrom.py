"""Nyströmformers equal the formula in loops, transformers where that is defined, and full attention in short texts."""

from typing import Any

import pytest
import torch
from models.compressed_transformer.tiny_models import build, random_ids
from models_cases import TOLERANCE
from torch import Tensor
from transformers import NystromformerConfig
from transformers.models.nystromformer.modeling_nystromformer import NystromformerSelfAttention

from hf_efficient_attn.models.compressed_transformer import nystrom


def by_landmarks(text: Tensor, maps: list[Tensor], num_landmarks: int, kernel: Tensor | None) -> Tensor:
    """Return the output of one head for one text before the last map, [n, D], in loops, with the same six steps.

    maps: of queries, keys and values, weights and biases, [D, hidden] and [D] each.
    """
    query, key, value = (text @ weight.T + bias for weight, bias in zip(maps[::2], maps[1::2], strict=True))
    tokens, width = query.shape
    query, key = query / width**0.25, key / width**0.25
    if tokens <= num_landmarks:
        out = (query @ key.T).softmax(-1) @ value
    else:
        cuts = [-(-segment * tokens // num_landmarks) for segment in range(num_landmarks + 1)]
        parts = list(zip(cuts[:-1], cuts[1:], strict=True))
        queries, keys = (torch.stack([each[a:b].mean(0) for a, b in parts]) for each in (query, key))
        between = (queries @ keys.T).softmax(-1)
        inverse = between.T / between.sum(0).max()
        eye = torch.eye(num_landmarks, dtype=text.dtype)
        for _ in range(6):
            product = between @ inverse
            inverse = 0.25 * inverse @ (13 * eye - product @ (15 * eye - product @ (7 * eye - product)))
        out = (query @ keys.T).softmax(-1) @ inverse @ ((queries @ key.T).softmax(-1) @ value)
    if kernel is None:
        return out
    half = len(kernel) // 2
    convolved = []
    for token in range(tokens):
        terms = [
            kernel[place] * value[token + place - half]
            for place in range(len(kernel))
            if 0 <= token + place - half < tokens
        ]
        convolved.append(torch.stack(terms).sum(0))
    return out + torch.stack(convolved)


def by_heads(attention: Any, text: Tensor) -> Tensor:
    """Return the output of all heads for one text before the last map, [n, hidden_size]."""
    heads = []
    for head in range(4):
        own = slice(head * 8, head * 8 + 8)
        maps = [part[own] for each in "qkv" for part in getattr(attention, f"{each}_proj").parameters()]
        kernel = None if attention.conv is None else attention.conv.weight[head].flatten()
        heads.append(by_landmarks(text, maps, attention.num_landmarks, kernel))
    return torch.cat(heads, 1)


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 8, 11])
@pytest.mark.parametrize("size", [None, 3])
def test_outputs_and_gradients_are_those_of_the_formula(tokens: int, size: int | None) -> None:
    """Of texts beside others, with padding behind them."""
    model = build("AutoModel", mechanism="nystrom", num_landmarks=4, conv_kernel_size=size).double()
    attention = model.layers[0].self_attn
    text = torch.randn(2, 12, 32, dtype=torch.float64, requires_grad=True)
    real = torch.arange(12) < torch.tensor([[tokens], [12]])
    found = attention.attend(text, real, False)[0][0, :tokens]
    expected = by_heads(attention, text[0, :tokens])
    torch.testing.assert_close(found, expected, atol=1e-11, rtol=1e-9)
    weight = torch.randn(tokens, 32, dtype=torch.float64)
    given = [text, *(getattr(attention, f"{each}_proj").weight for each in "qkv")]
    slopes = [torch.autograd.grad((each * weight).sum(), given) for each in (found, expected)]
    for own, wanted in zip(*slopes, strict=True):
        torch.testing.assert_close(own, wanted, atol=1e-9, rtol=1e-8)


@pytest.mark.parametrize("tokens", [0, 1, 5, 7])
def test_nothing_is_inverted_for_short_texts(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a batch whose texts all have at most as many tokens as there are landmarks; one may be padding alone."""
    monkeypatch.setattr(nystrom, "inverted", None)
    model = build("AutoModel", mechanism="nystrom", num_landmarks=7, conv_kernel_size=3).double()
    attention, text = model.layers[0].self_attn, torch.randn(2, 7, 32, dtype=torch.float64, requires_grad=True)
    real = torch.arange(7) < torch.tensor([[tokens], [7]])
    found = attention.attend(text, real, False)[0]
    assert found.isfinite().all()
    expected = by_heads(attention, text[1])
    torch.testing.assert_close(found[1], expected, atol=1e-11, rtol=1e-9)
    if tokens:
        torch.testing.assert_close(found[0, :tokens], by_heads(attention, text[0, :tokens]), atol=1e-11, rtol=1e-9)
    slopes = [torch.autograd.grad(each.square().sum(), text)[0][1] for each in (found[1], expected)]
    torch.testing.assert_close(slopes[0], slopes[1], atol=1e-9, rtol=1e-8)


@pytest.mark.parametrize("landmarks", [3, 6, 12])
def test_attention_of_transformers(landmarks: int) -> None:
    tokens = 12
    config = NystromformerConfig(
        hidden_size=32, num_attention_heads=4, num_landmarks=landmarks, segment_means_seq_len=tokens, conv_kernel_size=5
    )
    theirs = NystromformerSelfAttention(config).double().eval()
    fields = {"num_landmarks": landmarks, "conv_kernel_size": 5, "inverse_scale": "batch"}
    ours = build("AutoModel", mechanism="nystrom", **fields).double().layers[0].self_attn
    for own, other in (("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value"), ("conv", "conv")):
        getattr(ours, own).load_state_dict(getattr(theirs, other).state_dict())
    text = torch.randn(2, tokens, 32, dtype=torch.float64, requires_grad=True)
    found, expected = ours.attend(text, None, False)[0], theirs(text)[0]
    torch.testing.assert_close(found, expected, atol=1e-11, rtol=1e-9)
    weight = torch.randn(found.shape, dtype=torch.float64)
    slopes = [
        torch.autograd.grad((out * weight).sum(), [text, module.conv.weight])
        for out, module in ((found, ours), (expected, theirs))
    ]
    for own, wanted in zip(*slopes, strict=True):
        torch.testing.assert_close(own, wanted, atol=1e-9, rtol=1e-8)


@pytest.mark.filterwarnings("ignore:output_attentions=True")
@torch.no_grad()
def test_short_texts_have_full_attention_and_weights_say_what_is_read() -> None:
    model = build("AutoModel", mechanism="nystrom", num_landmarks=9, conv_kernel_size=None)
    full = build("AutoModel", mechanism="pattern")
    full.load_state_dict(model.state_dict())
    ids = random_ids(2, 9)
    expected = full(ids, output_attentions=True)
    found = model(ids, output_attentions=True)
    torch.testing.assert_close(found.last_hidden_state, expected.last_hidden_state, atol=TOLERANCE, rtol=TOLERANCE)
    torch.testing.assert_close(found.attentions[0], expected.attentions[0], atol=TOLERANCE, rtol=TOLERANCE)
    attention = build("AutoModel", mechanism="nystrom", conv_kernel_size=None, num_landmarks=4).layers[0].self_attn
    text = torch.randn(2, 9, 32)
    out, weights = attention.attend(text, None, True)
    value = attention.heads(attention.v_proj(text))
    torch.testing.assert_close((weights @ value).transpose(1, 2).flatten(2), out, atol=TOLERANCE, rtol=TOLERANCE)


@torch.no_grad()
def test_batch_mates_change_transformers_and_not_ours() -> None:
    ids, mates = random_ids(1, 12), random_ids(3, 12, seed=5)
    moved = {}
    for scale in ("head", "batch"):
        model = build("AutoModel", mechanism="nystrom", num_landmarks=4, inverse_scale=scale).double()
        for layer in model.layers:
            # landmarks that differ
            layer.self_attn.q_proj.weight.mul_(3)
        alone, together = model(ids).last_hidden_state, model(torch.cat((ids, mates))).last_hidden_state[:1]
        moved[scale] = float((alone - together).abs().max())
    assert moved["head"] < 1e-10 < 1e-6 < moved["batch"]
