"""What explanations say of keys that are chosen by content."""

import torch

import hf_efficient_attn as hea
from hf_efficient_attn.patterns import Causal


def test_a_choice_of_keys_is_said_in_words() -> None:
    sizes = {"num_attention_heads": 2, "hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 8}
    routing = hea.RoutingTransformerConfig(num_routing_heads=2, num_clusters=4, cluster_tokens=8, **sizes)
    assert "queries that read up to 12 keys" in str(hea.explain(routing, 64))
    reformer = hea.EfficientReformerConfig(attn_layers=["lsh"], num_hashes=2, **sizes)
    assert "2 orders of the tokens in chunks of 64, which read themselves, 1 before" in str(hea.explain(reformer, 64))
    chosen = hea.ChosenTokens(torch.empty(1, 1, 64, 4, dtype=torch.int32, device="meta"))
    assert "up to 4 keys for every query" in str(hea.explain(Causal(), 64, chosen=chosen))
    assert "up to 2 blocks of 8 keys for every query" in str(hea.explain(hea.patterns.BlockTopK(8, 2), 64))


def test_the_cost_of_tokens_is_of_what_neighbours_read_together() -> None:
    """Equal numbers of keys: those that neighbours share cost less than those that each draws for itself."""
    position = torch.arange(4096)[:, None]
    near = position - torch.arange(128)
    drawn = (torch.rand(4096, 128, generator=torch.Generator().manual_seed(0)) * (position + 1)).long()
    found = []
    for tokens in (near, drawn):
        chosen = hea.ChosenTokens(tokens[None, None])
        found.append(hea.explain(Causal(), 4096, num_heads=2, head_dim=64, chosen=chosen))
    near_pairs, drawn_pairs = (each.computed_pairs for each in found)
    # 128 queries, the cheapest tile, read 128 tokens before each of them, 255 different ones
    assert near_pairs == 2 * 4096 * 255
    assert drawn_pairs > 4 * near_pairs
