"""What explanations say of keys that are chosen by content."""

import torch

import hf_efficient_attn as hea
from hf_efficient_attn.patterns import Causal


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
