"""Linformers compute what the specification says, head by head, gradients included; and n · k scores."""

from typing import Any

import pytest
import torch
from models.compressed_transformer.dense_linformer import block, linformer, matrices, normed
from models.compressed_transformer.tiny_models import build, random_ids
from safetensors.torch import load_file
from torch.nn.attention import SDPBackend, sdpa_kernel

import hf_efficient_attn as hea
from hf_efficient_attn.models.mechanisms.sequences import whole_rows
from hf_efficient_attn.models.prologue import prepare_call

FORMS: dict[str, dict[str, Any]] = {
    "each head": {"projection_sharing": "none"},
    "headwise": {},
    "headwise, projected first": {"projection_first": True},
    "keys and values": {"projection_sharing": "kv"},
    "layerwise": {"projection_sharing": "layerwise"},
    "layerwise, projected first": {"projection_sharing": "layerwise", "projection_first": True},
    "mean": {"projection_type": "mean", "projected_tokens": 16},
    "mean, projected first": {"projection_type": "mean", "projected_tokens": 16, "projection_first": True},
}


def expected_states(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the last hidden states of one text, [n, hidden_size]."""
    config, weights = model.config, dict(model.named_parameters())
    tokens = ids.shape[1]
    text = weights["embed_tokens.weight"][ids[0]] + weights["embeddings.positions.table.weight"][:tokens]
    text = normed(config, weights, "embeddings.norm", text)
    for layer in range(config.num_hidden_layers):
        attended = linformer(config, weights, layer, text, matrices(config, weights, layer, tokens))
        text = block(config, weights, layer, text, attended)
    return text


def gradients(model: Any, output: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the gradients of a sum that no number of the output takes part in evenly."""
    total = (output * torch.arange(output.numel(), dtype=output.dtype).view_as(output).sin()).sum()
    named = dict(model.named_parameters())
    return dict(zip(named, torch.autograd.grad(total, list(named.values())), strict=True))


@pytest.mark.parametrize("tokens", [1, 7, 13])
@pytest.mark.parametrize("form", FORMS)
def test_states_and_gradients_are_those_of_the_specification(form: str, tokens: int) -> None:
    model = build("AutoModel", **FORMS[form]).double()
    ids = random_ids(1, tokens)
    # gradients of torch's fused kernel on CPUs differ by 1e-9
    with sdpa_kernel(SDPBackend.MATH):
        found, expected = model(ids).last_hidden_state[0], expected_states(model, ids)
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-10)
        actual = gradients(model, found)
    for name, gradient in gradients(model, expected).items():
        torch.testing.assert_close(actual[name], gradient, atol=1e-10, rtol=1e-8, msg=name)


@pytest.mark.parametrize("sharing", ["none", "headwise", "kv", "layerwise"])
def test_convolutions_are_torchs(sharing: str) -> None:
    """With kernel and stride N / k; the last one of a text has fewer tokens."""
    model = build("AutoModel", projection_type="convolution", projection_sharing=sharing, projected_tokens=16).double()
    layer, text = model.layers[0].self_attn, torch.randn(1, 10, 32, dtype=torch.float64)
    maps = (layer.length_maps or model.shared_maps)()
    out, _ = layer.attend(text, None, False, shared_maps=maps)
    read = []
    for states, own in zip((layer.k_proj(text), layer.v_proj(text)), maps, strict=True):
        padded = torch.nn.functional.pad(states, (0, 0, 0, 2)).unflatten(-1, (4, 8)).permute(2, 0, 3, 1)
        weight = own.weight if sharing == "none" else own.weight.expand(4, -1, -1, -1)
        heads = [torch.nn.functional.conv1d(*pair, stride=4) for pair in zip(padded, weight, strict=True)]
        read.append(torch.stack(heads, 1).mT)
    query = layer.q_proj(text).unflatten(-1, (4, 8)).transpose(1, 2)
    expected = (query @ read[0].mT / 8**0.5).softmax(-1) @ read[1]
    torch.testing.assert_close(out, expected.transpose(1, 2).flatten(2), atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("first", [False, True])
@torch.no_grad()
def test_projected_by_the_identity_it_is_full_attention(first: bool) -> None:
    """And the order of the projected tokens does not matter."""
    tokens = 12
    fields = {"projected_tokens": tokens, "max_position_embeddings": tokens, "projection_first": first}
    model = build("AutoModel", **fields).double()
    full = build("AutoModel", max_position_embeddings=tokens, mechanism="pattern").double()
    eye = torch.eye(tokens, dtype=torch.float64)
    for layer in model.layers:
        order = torch.randperm(tokens, generator=torch.Generator().manual_seed(0))
        for weight in layer.self_attn.length_maps.parameters():
            weight.copy_(eye[order])
    found = {name: each for name, each in model.state_dict().items() if "length_maps" not in name}
    full.load_state_dict(found)
    ids = random_ids(2, tokens)
    expected = full(ids).last_hidden_state
    torch.testing.assert_close(model(ids).last_hidden_state, expected, atol=1e-12, rtol=1e-10)


@torch.no_grad()
def test_readings_of_the_bias() -> None:
    """Projected first, the bias of a map is added once; afterwards, as often as the row of the matrix sums to."""
    paper, authors = (build("AutoModel", projection_first=first).double() for first in (False, True))
    text = torch.randn(1, 9, 32, dtype=torch.float64)
    layers = [model.layers[0].self_attn for model in (paper, authors)]
    assert not torch.allclose(*(layer.attend(text, None, False)[0] for layer in layers))
    for layer in layers:
        layer.k_proj.bias.zero_()
        layer.v_proj.bias.zero_()
    torch.testing.assert_close(*(layer.attend(text, None, False)[0] for layer in layers))
    biased = build("AutoModel", projection_bias=True).double().layers[0].self_attn
    keys, values = biased.length_maps()
    assert keys.bias.shape == values.bias.shape == (4,)
    without = build("AutoModel").double().layers[0].self_attn
    names = without.state_dict().keys()
    without.load_state_dict({name: each for name, each in biased.state_dict().items() if name in names})
    found, weights = biased.attend(text, None, True)
    scores = without.attend(text, None, True)[1].log()
    query = biased.heads(biased.q_proj(text))
    added = query.sum(-1, keepdim=True) * keys.bias / 8**0.5
    torch.testing.assert_close(weights, (scores + added).softmax(-1))


def test_shared_matrices_are_saved_once(tmp_path: Any) -> None:
    for sharing, count in (("none", 4), ("headwise", 4), ("kv", 2), ("layerwise", 1)):
        model = build("AutoModel", projection_sharing=sharing)
        model.save_pretrained(tmp_path / sharing)
        saved = load_file(tmp_path / sharing / "model.safetensors")
        assert len([name for name in saved if "_maps" in name]) == count
        assert saved.keys() == model.state_dict().keys()
        size = 4 * 64 * (4 if sharing == "none" else 1)
        assert all(saved[name].numel() == size for name in saved if "_maps" in name)


def test_layers_may_project_to_different_numbers_of_tokens() -> None:
    model = build("AutoModel", projected_tokens=[6, 3])
    weights = model(random_ids(2, 9), output_attentions=True).attentions
    assert [each.shape for each in weights] == [(2, 4, 9, 6), (2, 4, 9, 3)]
    torch.testing.assert_close(weights[0].sum(-1), torch.ones(2, 4, 9))


@torch.no_grad()
def test_ignored_padding_is_read_as_in_the_authors_code() -> None:
    """There a mask only makes the embeddings of padding zeros, so that how far a text is padded changes it."""
    ignoring, model = (build("AutoModel", projection_padding=how) for how in ("ignore", "zero"))
    ids, mask = random_ids(1, 9), torch.ones(1, 9, dtype=torch.long)
    torch.testing.assert_close(ignoring(ids).last_hidden_state, model(ids).last_hidden_state)
    mask[:, 6:] = 0
    short = ignoring(ids[:, :6]).last_hidden_state
    padded = ignoring(ids, attention_mask=mask).last_hidden_state[:, :6]
    assert not torch.allclose(padded, short, atol=1e-3)
    call = prepare_call(ignoring.config, ignoring.embed_tokens(ids), mask, None, None, {})
    embedded = ignoring.embeddings(call)[0] * mask.unsqueeze(-1)
    for layer in ignoring.layers:
        embedded = layer(embedded, sequences=whole_rows())
    torch.testing.assert_close(padded, embedded[:, :6])
    with pytest.raises(hea.InputError, match="ignores masks"):
        ignoring(ids, position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]))


@pytest.mark.parametrize("projection_type", ["linear", "convolution", "mean"])
def test_a_conversion_has_the_length_of_its_source(projection_type: str) -> None:
    model = build("AutoModelForMaskedLM", projection_type=projection_type, projected_tokens=16)
    with pytest.raises(hea.ConfigurationError, match="for texts of up to 64 tokens"):
        hea.convert(model, max_position_embeddings=128)
    ids = random_ids(1, 9)
    with torch.no_grad():
        assert torch.equal(hea.convert(model)(ids).logits, model(ids).logits)
