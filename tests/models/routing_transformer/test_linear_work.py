"""Routing takes work that is linear in the text where there are as many clusters for each token, and few numbers."""

from typing import Any

import pytest
import torch
from layout.test_bounded_work import Written
from models.routing_transformer.tiny_models import build, tokens

import hf_efficient_attn as hea
from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.layout.selected_keys import Sizes
from hf_efficient_attn.layout.token_mask import NO_MASK
from hf_efficient_attn.models.routing_transformer import clusters
from hf_efficient_attn.models.routing_transformer.clusters import nearest, on_sphere, seen, similarities
from hf_efficient_attn.patterns import Causal


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


def test_what_centroids_have_seen_is_the_sum_of_their_members() -> None:
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(2, 3, 11, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    means = torch.randn(3, 5, 4, generator=generator, dtype=torch.float64)
    clusters = torch.randint(0, 4, (2, 3, 11), generator=generator)
    is_real = torch.rand(2, 11, generator=generator) > 0.3
    members = torch.nn.functional.one_hot(clusters, 5) * is_real[:, None, :, None]
    found = seen(states, clusters, is_real, means, is_real.sum())
    torch.testing.assert_close(found.sums, torch.einsum("bhtc,bhtd->hcd", members.double(), states))
    assert torch.equal(found.counts, members.sum((0, 2)).double())
    apart = (states - torch.einsum("bhtc,hcd->bhtd", members.double(), means)).square().mean(-1)
    expected = apart[is_real[:, None].expand(apart.shape)].mean()
    torch.testing.assert_close(found.distance, expected)
    one, other = (torch.autograd.grad(each, states)[0] for each in (found.distance, expected))
    torch.testing.assert_close(one, other)


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
