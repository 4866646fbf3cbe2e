"""The authors' networks, and fields that no model can be built from."""

import pytest
import torch
from models_cases import TINY

import hf_efficient_attn as hea
from hf_efficient_attn.messages import warn_once

BUILD = hea.EfficientReformerConfig


@pytest.mark.parametrize(
    ("preset", "parameters"), [("enwik8", 149_182_722), ("imagenet64", 60_664_832), ("copy_task", 436_864)]
)
def test_presets_have_so_many_parameters(preset: str, parameters: int) -> None:
    """The first is that of the released checkpoint, as transformers counts it."""
    with torch.device("meta"):
        model = hea.EfficientReformerForCausalLM(getattr(BUILD, preset)())
    assert sum(each.numel() for each in model.parameters()) == parameters


def test_heads_may_be_wider_than_the_states_and_embeddings_tied() -> None:
    config = BUILD(**TINY, head_dim=12, tie_word_embeddings=True, is_causal=True, gated_mlp=True)
    model = hea.EfficientReformerForCausalLM(config).eval()
    ids = torch.arange(3, 15)[None]
    out = model(ids, labels=ids)
    out.loss.backward()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(each.grad is not None for each in model.parameters())


def test_streams_side_by_side_are_wider_than_libraries_are_told() -> None:
    """As in the presets and in converted checkpoints; under a head, nobody asks."""
    warn_once.cache_clear()
    ids = torch.arange(3, 15)[None]
    config = BUILD(**TINY, stream_join="concat")
    hea.EfficientReformerForMaskedLM(config)(ids)
    model = hea.EfficientReformerModel(config)
    with pytest.warns(UserWarning, match="hidden_size=32"):
        assert model(ids).last_hidden_state.shape[-1] == model.config.output_width == 64


def test_axial_positions_are_the_coordinates_side_by_side() -> None:
    model = hea.EfficientReformerModel(BUILD(**{**TINY, "max_position_embeddings": 24}, axial_pos_shape=[2, 3, 4]))
    positions = model.positions.table
    first, second, third = positions.axes
    found = positions(torch.arange(24)[None])[0]
    for index in range(24):
        expected = torch.cat((first[index // 12], second[index // 4 % 3], third[index % 4]))
        assert torch.equal(found[index], expected)
