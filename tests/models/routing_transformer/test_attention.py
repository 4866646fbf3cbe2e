"""What routing heads compute: the definition in float64 with gradients, closed forms, linear work; presets."""

from typing import Any

import pytest
import torch
from layout.test_bounded_work import Written
from models.routing_transformer.dense_routing import DenseRouting
from models.routing_transformer.dense_routing import on_sphere as dense_on_sphere
from models.routing_transformer.tiny_models import build, tokens

import hf_efficient_attn as hea
from hf_efficient_attn.attention.layer import weights_of_rows
from hf_efficient_attn.integration.forward_context import CACHE_ARGUMENT
from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.layout.selected_keys import Sizes
from hf_efficient_attn.layout.token_mask import NO_MASK
from hf_efficient_attn.models.routing_transformer import clusters
from hf_efficient_attn.models.routing_transformer.attention import RoutingInputs
from hf_efficient_attn.models.routing_transformer.clusters import nearest, on_sphere, similarities
from hf_efficient_attn.patterns import Band, Causal

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
    normed = dense_on_sphere(query)
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


def groups(num_groups: int) -> hea.KeyGroups:
    """Return groups of 16 neighbours that read themselves."""
    places = torch.arange(16 * num_groups).view(1, 1, num_groups, 16)
    return hea.KeyGroups(places, places)


def test_a_tile_of_groups_reads_none_but_its_own() -> None:
    written = []
    for num_groups in (512, 1024):
        layout, chosen = Layout(Causal(), 2, 16 * num_groups, 16 * num_groups), groups(num_groups)
        with Written() as mode:
            found = list(chosen.tiles(layout, NO_MASK, Sizes(1, 2, 2, most_pairs=1 << 14)))
        assert sum(each.keys.numel() for each in found) == 2 * 16 * num_groups
        written.append(mode.numbers)
    assert written[1] <= 2.05 * written[0]


def test_nearest_centroids_are_found_some_tokens_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    states = on_sphere(torch.randn(2, 3, 50, 8, generator=generator, dtype=torch.float64))
    means = on_sphere(torch.randn(3, 7, 8, generator=generator, dtype=torch.float64))
    means[:, 4] = means[:, 2]
    expected = similarities(states, means).argmax(-1)
    monkeypatch.setattr(clusters, "CACHED_NUMBERS", 2 * 3 * 7 * 9)
    with Written() as mode:
        assert torch.equal(nearest(states, means), expected)
    assert mode.largest <= 2 * 3 * 9 * 8
    assert not (nearest(states, means) == 4).any()


@pytest.mark.parametrize("fields", [{}, {"membership": "balanced"}])
def test_parts_change_nothing(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    ids, states = tokens(2, 24), []
    for most in (None, 40):
        if most is not None:
            monkeypatch.setattr(clusters, "CACHED_NUMBERS", most)
        model = build("AutoModelForCausalLM", **fields).train()
        loss = model(ids, labels=ids).loss
        loss.backward()
        states.append([loss.detach(), *(each.grad for each in model.parameters()), *model.buffers()])
    for one, other in zip(*states, strict=True):
        torch.testing.assert_close(one, other)


# of the authors' code: n, layers, hidden, filter, local + routing heads, clusters, tokens of a cluster
AUTHORS = {
    "wikitext103": (4096, 14, 1024, 3072, 8, 8, 8, 512),
    "wikitext103_short": (1024, 20, 1024, 3072, 8, 8, 2, 512),
    "enwik8": (8192, 12, 1024, 3072, 4, 4, 16, 512),
    "enwik8_long": (12_288, 12, 1024, 3072, 4, 4, 48, 256),
    "pg19": (8192, 22, 1032, 4096, 6, 2, 16, 512),
    "imagenet64": (12_288, 24, 1024, 2048, 12, 4, 8, 2048),
    "cifar10": (3072, 12, 1024, 2048, 4, 4, 6, 512),
}


@pytest.mark.parametrize("name", AUTHORS)
def test_sizes_and_parameters(name: str) -> None:
    config = getattr(hea.RoutingTransformerConfig, name)()
    last = config.num_hidden_layers - 1
    routing = config.routing_heads(last)
    shape = (config.max_position_embeddings, config.num_hidden_layers, config.hidden_size, config.intermediate_size)
    heads = (config.num_attention_heads - routing, routing, config.num_clusters, config.cluster_tokens)
    assert (*shape, *heads) == AUTHORS[name]
    assert config.routing_heads(0) == (0 if name == "pg19" else routing)
    with torch.device("meta"):
        model = hea.RoutingTransformerForCausalLM(config)
    found = sum(parameter.numel() for parameter in model.parameters())
    assert found == counted(config)


def counted(config: hea.RoutingTransformerConfig) -> int:
    """Return the number of parameters by the sizes, without building a model."""
    width, layers = config.hidden_size, config.num_hidden_layers
    total = config.vocab_size * width
    for layer in range(layers):
        routing, dim = config.routing_heads(layer), config.head_dim
        maps = 3 * width * width + width * (config.num_attention_heads - routing) * dim + dim * dim
        tables = (1 + bool(routing)) * (config.max_relative_distance + 1) * dim
        total += maps + tables + 3 * width * config.intermediate_size + 4 * width
    return total


def test_a_cache_of_a_pattern_holds_too_little_for_layers_that_route() -> None:
    model = build()
    with pytest.raises(hea.ConfigurationError, match="routing heads, which may attend to any earlier token"):
        hea.PatternCache(model.config)
    local = build(layers_with_routing=[])
    ids = tokens(1, 12)
    with torch.no_grad():
        expected = local(ids, use_cache=False).logits
        cache = hea.PatternCache(local.config)
        found = torch.cat([local(ids[:, [each]], **{CACHE_ARGUMENT: cache}).logits for each in range(12)], 1)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert cache.layers[0].keys.shape[2] == 3


# it is given once in a process
@pytest.mark.filterwarnings("ignore:output_attentions=True")
def test_explain_sums_routing_and_local_heads() -> None:
    """In one cluster of all tokens a token reads as many as it can."""
    model, ids = build("AutoModel", num_clusters=1), tokens(1, 20)
    explanation = hea.explain(model, 20)
    assert explanation.beside is not None
    # the last 4 tokens in routing heads, and in local ones
    assert (explanation.num_heads, explanation.total_pairs) == (4, 4 * 400)
    assert explanation.allowed_pairs == 4 * (1 + 2 + 3 + 17 * 4)
    with torch.no_grad():
        weights = model(ids, output_attentions=True).attentions[0]
    assert int((weights > 0).sum()) == explanation.allowed_pairs
    assert "2 of 4 heads route: a query attends to at most the last 4 members of its cluster." in explanation.notes
    alone, local = (build(num_routing_heads=heads) for heads in (4, 2))
    routed = hea.explain(alone, 8192, backend="gathered")
    assert (routed.backend, routed.beside, routed.num_heads) == ("gathered", None, 4)
    both = hea.explain(local, 8192)
    assert both.beside is not None
    assert (both.backend, both.beside.backend) == ("gathered", "blocked")
