"""Positions against their formulas, and what padding does to them."""

import math

import pytest
import torch
from models_cases import TINY

import hf_efficient_attn as hea
from hf_efficient_attn.models.parts.embeddings import SinusoidalPositions, alibi_bias


def test_sinusoids_are_the_papers() -> None:
    table = SinusoidalPositions(8)(torch.arange(50)[None])[0]
    for position in (0, 1, 17, 49):
        for i in range(4):
            angle = position / 10_000 ** (2 * i / 8)
            assert table[position, 2 * i].item() == pytest.approx(math.sin(angle), abs=1e-5)
            assert table[position, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-5)


def test_alibi_slopes() -> None:
    """A geometric sequence for powers of two; in between, every other slope of the next power is added."""
    eight = (-alibi_bias(8, torch.tensor([1]), 2)[0, :, 0, 0]).tolist()
    assert eight == [2 ** -(i + 1) for i in range(8)]
    twelve = (-alibi_bias(12, torch.tensor([1]), 2)[0, :, 0, 0]).tolist()
    assert twelve == pytest.approx(eight + [2 ** -(i + 0.5) for i in range(4)])


def test_alibi_counts_from_the_cache() -> None:
    assert torch.equal(alibi_bias(2, torch.tensor([3, 4]), 5), alibi_bias(2, torch.arange(5), 5)[:, :, 3:])


@pytest.mark.parametrize("kind", ["learned", "sinusoidal", "rope", "alibi"])
def test_position_matters(kind: str) -> None:
    """The order of earlier tokens changes the last one."""
    torch.manual_seed(0)
    fields = {**TINY, "block": "pre_ln", "initializer_range": 0.3, "position_embedding_type": kind}
    model = hea.SimplifiedTransformerModel(hea.SimplifiedTransformerConfig(**fields)).eval()
    outputs = [model(torch.tensor([ids])).last_hidden_state[0, -1] for ids in ([5, 6, 7, 8], [6, 5, 7, 8])]
    assert not torch.allclose(*outputs, atol=1e-3)


def test_rope_scaling_is_read_from_the_config() -> None:
    scaled = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}
    fields = {**TINY, "position_embedding_type": "rope"}
    plain, stretched = (
        hea.SimplifiedTransformerModel(hea.SimplifiedTransformerConfig(**fields, **extra)).positions.rotary.inv_freq
        for extra in ({}, {"rope_parameters": scaled})
    )
    torch.testing.assert_close(stretched * 4, plain)
