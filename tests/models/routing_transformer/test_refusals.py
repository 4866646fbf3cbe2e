"""Configurations that no model can have, and calls that would compute something else, are refused with a sentence."""

from typing import Any

import pytest
import torch
from models.routing_transformer.tiny_models import build, tokens

import hf_efficient_attn as hea

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"num_routing_heads": 9}, "num_routing_heads=9 counts some of the heads"),
    ({"num_clusters": 0}, "num_clusters=0 must be at least 1"),
    ({"max_relative_distance": 0}, "max_relative_distance=0 must be at least 1"),
    ({"centroid_decay": 1.5}, "centroid_decay=1.5 is a share"),
    ({"commitment_weight": -1.0}, "commitment_weight=-1.0 must be"),
    ({"layers_with_routing": [12]}, "0 to 11"),
    ({"share_qk": False}, "share_qk=False needs is_causal=False"),
    ({"membership": "causal", "is_causal": False}, "needs is_causal=True"),
    ({"membership": "top"}, "must be one of: None, balanced, causal"),
    ({"include_self": False, "is_causal": False}, "include_self=False means"),
    ({"include_self": False, "cluster_tokens": 1}, "leaves nothing to read"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=[str(fields) for fields, _ in REFUSED])
def test_fields_that_exclude_each_other(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(hea.ConfigurationError, match=message):
        hea.RoutingTransformerConfig(**fields)


def test_a_cache_of_a_pattern_holds_too_little_for_layers_that_route() -> None:
    model = build()
    with pytest.raises(hea.ConfigurationError, match="routing heads, which may read any token of the past"):
        hea.PatternCache(model.config)
    local = build(layers_with_routing=[])
    ids = tokens(1, 12)
    with torch.no_grad():
        expected = local(ids, use_cache=False).logits
        cache = hea.PatternCache(local.config)
        found = torch.cat([local(ids[:, [each]], past_key_values=cache).logits for each in range(12)], 1)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert cache.layers[0].keys.shape[2] == 3


def test_explain_says_what_routes() -> None:
    routed, local = (str(hea.explain(build(layers_with_routing=layers), 256)) for layers in ([0, 1], []))
    assert "2 of 4 heads route: a query reads the last 4 members of its cluster at most" in routed
    assert "route" not in local
    balanced = str(hea.explain(build(is_causal=False), 256))
    assert "a query reads 4 tokens at most of each of 3 balanced clusters" in balanced
