"""What routing heads compute: the definition in float64 with gradients, and closed forms of the paper."""

from typing import Any

import pytest
import torch
from models.routing_transformer.dense_routing import DenseRouting, on_sphere
from models.routing_transformer.tiny_models import build, tokens
from models_cases import randomize

import hf_efficient_attn as hea
from hf_efficient_attn.attention.layer import weights_of_rows
from hf_efficient_attn.models.routing_transformer.attention import RoutingInputs
from hf_efficient_attn.patterns import Band

CHOICES: dict[str, dict[str, Any]] = {
    "causal": {},
    "causal, not itself": {"include_self": False, "position_embedding_type": "none", "routing_scale": 0.25},
    "causal, one member": {"cluster_tokens": 1},
    "causal, seven members": {"cluster_tokens": 7, "num_clusters": 2},
    "balanced": {"membership": "balanced"},
    "balanced, both sides": {"is_causal": False, "attention_pattern": Band(3, 0)},
    "balanced, both sides, shared": {"is_causal": False, "share_qk": True, "attention_pattern": Band(3, 0)},
}


@pytest.mark.parametrize("num_tokens", [1, 3, 23])
@pytest.mark.parametrize("name", CHOICES)
def test_equals_the_definition_with_gradients(name: str, num_tokens: int) -> None:
    model = build("AutoModel", num_hidden_layers=1, **CHOICES[name]).double()
    layer = model.layers[0].self_attn
    hidden = model.embed_tokens(tokens(1, num_tokens)).detach()
    inputs = RoutingInputs(
        documents=torch.zeros(1, num_tokens, dtype=torch.long), query_positions=torch.arange(num_tokens)
    )
    mix = torch.randn(num_tokens, hidden.shape[2], dtype=torch.float64)
    found = []
    for compute in (lambda states: layer(states, inputs)[0][0], lambda states: DenseRouting(layer)(states[0])):
        layer.zero_grad()
        states = hidden.clone().requires_grad_()
        out = compute(states)
        (out * mix).sum().backward()
        found.append([out, states.grad, *(each.grad for each in layer.parameters())])
    for actual, expected in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected if expected is not None else torch.zeros_like(actual))


def test_one_cluster_of_all_tokens_is_dense_attention_of_normed_queries() -> None:
    """The authors' mean then divides by 1.01."""
    config = {"num_clusters": 1, "cluster_tokens": 16, "num_routing_heads": 4, "position_embedding_type": "none"}
    model = build("AutoModel", num_hidden_layers=1, membership="balanced", **config)
    layer = model.layers[0].self_attn
    hidden = model.embed_tokens(tokens(2, 16))
    query, value = (each(hidden).unflatten(-1, (4, 8)).transpose(1, 2) for each in (layer.q_proj, layer.v_proj))
    normed = on_sphere(query)
    expected = torch.nn.functional.scaled_dot_product_attention(normed, normed, value, is_causal=True, scale=1.0)
    inputs = RoutingInputs(documents=torch.zeros(1, 16, dtype=torch.long), query_positions=torch.arange(16))
    actual = layer(hidden, inputs)[0]
    torch.testing.assert_close(actual, layer.o_proj(expected.transpose(1, 2).flatten(2) / 1.01))


@pytest.mark.parametrize("fields", [{}, {"membership": "balanced"}, {"is_causal": False}])
def test_the_order_of_the_centroids_changes_nothing(fields: dict[str, Any]) -> None:
    model, ids = build("AutoModel", **fields), tokens(2, 20)
    with torch.no_grad():
        expected = model(ids).last_hidden_state
        for layer in model.layers:
            means = layer.self_attn.centroids.means
            means.copy_(means.flip(1))
        torch.testing.assert_close(model(ids).last_hidden_state, expected, atol=1e-6, rtol=1e-6)


def test_a_token_in_no_cluster_gets_nothing_from_routing_heads() -> None:
    model = build("AutoModel", num_hidden_layers=1, is_causal=False, num_clusters=1, cluster_tokens=3)
    layer, hidden = model.layers[0].self_attn, model.embed_tokens(tokens(1, 9))
    inputs = RoutingInputs(documents=torch.zeros(1, 9, dtype=torch.long), query_positions=torch.arange(9))
    layer.o_proj.weight.data = torch.eye(32)
    out = layer(hidden, inputs)[0].unflatten(-1, (4, 8))
    has_none = (out[0, :, :2] == 0).all(-1)
    assert has_none.sum(0).tolist() == [6, 6]


# it is given once in a process
@pytest.mark.filterwarnings("ignore:output_attentions=True")
@pytest.mark.parametrize("fields", [{}, {"membership": "balanced"}, {"is_causal": False}])
def test_weights_give_the_output_and_rows_of_them_are_the_same(fields: dict[str, Any]) -> None:
    model, ids = build("AutoModel", **fields), tokens(2, 12)
    with torch.no_grad():
        expected, whole = model(ids).last_hidden_state, model(ids, output_attentions=True)
    torch.testing.assert_close(whole.last_hidden_state, expected, atol=1e-6, rtol=1e-6)
    with torch.no_grad(), weights_of_rows([2, 11]):
        rows = model(ids, output_attentions=True).attentions
    for some, every in zip(rows, whole.attentions, strict=True):
        torch.testing.assert_close(some, every[:, :, [2, 11]])


def test_presets_of_other_sizes_still_compute() -> None:
    config = hea.RoutingTransformerConfig.pg19(
        hidden_size=24, intermediate_size=32, num_hidden_layers=2, layers_with_routing=[1], vocab_size=61
    )
    model = randomize(hea.RoutingTransformerForCausalLM(config)).eval()
    assert model(tokens(1, 9)).logits.isfinite().all()
