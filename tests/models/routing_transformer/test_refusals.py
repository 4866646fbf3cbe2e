"""Configurations that no model can have, and calls that would compute something else, are refused with a sentence."""

import pytest
import torch
from models.routing_transformer.tiny_models import build, tokens

import hf_efficient_attn as hea
from hf_efficient_attn.integration.forward_context import CACHE_ARGUMENT


def test_a_cache_of_a_pattern_holds_too_little_for_layers_that_route() -> None:
    model = build()
    with pytest.raises(hea.ConfigurationError, match="routing heads, which may read any token of the past"):
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
    said = hea.explain(model, 20)
    assert said.beside is not None
    # the last 4 tokens in routing heads, and in local ones
    assert (said.num_heads, said.total_pairs) == (4, 4 * 400)
    assert said.allowed_pairs == 4 * (1 + 2 + 3 + 17 * 4)
    with torch.no_grad():
        weights = model(ids, output_attentions=True).attentions[0]
    assert int((weights > 0).sum()) == said.allowed_pairs
    assert "2 of 4 heads route: a query reads the last 4 members of its cluster at most." in said.notes
    alone, local = (build(num_routing_heads=heads) for heads in (4, 2))
    routed = hea.explain(alone, 8192, backend="gathered")
    assert (routed.backend, routed.beside, routed.num_heads) == ("gathered", None, 4)
    both = hea.explain(local, 8192)
    assert both.beside is not None
    assert (both.backend, both.beside.backend) == ("gathered", "blocked")
    assert both.all_layers is not None
    assert both.relative_cost == pytest.approx(both.all_layers.relative_cost)
    # each kind has half of the heads, and of the baseline
    assert both.beside.relative_cost / 2 < both.relative_cost
    assert "2 heads, band(3, 0), backend blocked" in str(both)
    assert both.to_dict()["beside"]["backend"] == "blocked"
    with pytest.raises(hea.UnsupportedBackendError, match="gathered"):
        hea.explain(local, 64, backend="gathered")
    assert hea.explain(build(layers_with_routing=[]), 64).beside is None
    assert "4 tokens at most of each of 3 balanced clusters" in str(
        hea.explain(build(is_causal=False, membership="balanced"), 64)
    )


def test_explain_of_heads_that_do_not_read_themselves() -> None:
    said = hea.explain(build(include_self=False, num_routing_heads=4, cluster_tokens=3), 10)
    assert said.allowed_pairs == 4 * (0 + 1 + 8 * 2)
