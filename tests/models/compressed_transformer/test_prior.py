"""Priors by distance, average attention and shared keys equal their formulas, with gradients."""

import pytest
import torch
from models.compressed_transformer.softmax_heads import compare, readable, states_of
from models.compressed_transformer.tiny_models import build

import hf_efficient_attn as hea
from hf_efficient_attn.patterns import Band


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
def test_average_attention_reads_all_tokens_alike(is_causal: bool) -> None:
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
