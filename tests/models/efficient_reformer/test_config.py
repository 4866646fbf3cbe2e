"""The authors' networks, and fields that no model can be built from."""

from typing import Any

import pytest
import torch
from models_cases import TINY

import hf_efficient_attn as hea
from hf_efficient_attn.attention.notices import warn_once

BUILD = hea.EfficientReformerConfig


@pytest.mark.parametrize(
    ("preset", "parameters"), [("enwik8", 149_182_722), ("imagenet64", 60_664_832), ("copy_task", 436_864)]
)
def test_presets_have_so_many_parameters(preset: str, parameters: int) -> None:
    """The first is that of the released checkpoint, as transformers counts it."""
    with torch.device("meta"):
        model = hea.EfficientReformerForCausalLM(getattr(BUILD, preset)())
    assert sum(each.numel() for each in model.parameters()) == parameters


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attn_layers": ["lsh", "full"]}, "attn_layers=.* must hold 'lsh' or 'local'"),
        ({"attn_layers": ["lsh"] * 3}, "whose length divides their number"),
        ({"num_buckets": 7}, "every factor must be even"),
        ({"num_buckets": [2, 0]}, "every factor must be even"),
        ({"lsh_attn_chunk_length": 0}, "lsh_attn_chunk_length=0 must be at least 1"),
        ({"axial_pos_shape": [4, 4]}, "has 16 positions, but max_position_embeddings=64"),
        ({"axial_pos_embds_dim": [8, 8]}, "must add up to hidden_size=32"),
        ({"position_embedding_type": "rope", "head_dim": 7}, "need an even head_dim"),
        ({"tie_word_embeddings": True, "stream_join": "concat"}, "Use stream_join='mean'"),
        ({"attention_pattern": hea.patterns.Band(1, 0)}, "follow no other pattern"),
        ({"position_embedding_type": "alibi"}, "position_embedding_type='alibi'; it must be one of: axial"),
    ],
)
def test_fields_that_exclude_each_other_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(hea.ConfigurationError, match=message):
        BUILD(**{**TINY, **fields})


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


@pytest.mark.parametrize("kind", ["axial", "learned"])
def test_texts_longer_than_the_positions_are_refused(kind: str) -> None:
    model = hea.EfficientReformerModel(BUILD(**TINY, position_embedding_type=kind))
    model(torch.full((1, 64), 5))
    with pytest.raises(hea.InputError, match="Truncate to 64 tokens"):
        model(torch.full((1, 65), 5))


def test_axial_positions_are_the_coordinates_side_by_side() -> None:
    model = hea.EfficientReformerModel(BUILD(**{**TINY, "max_position_embeddings": 24}, axial_pos_shape=[2, 3, 4]))
    positions = model.positions.table
    first, second, third = positions.axes
    found = positions(torch.arange(24)[None])[0]
    for index in range(24):
        expected = torch.cat((first[index // 12], second[index // 4 % 3], third[index % 4]))
        assert torch.equal(found[index], expected)
