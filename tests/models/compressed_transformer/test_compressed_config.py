"""Configurations that no compressed Transformer can have are refused with a sentence; presets have their shapes."""

import pytest
import torch
from models.compressed_transformer.tiny_models import build, random_ids
from models_cases import TINY
from transformers import NystromformerConfig, NystromformerModel

import hf_efficient_attn as hea
from hf_efficient_attn.patterns import Band


@pytest.mark.parametrize(
    ("preset", "layers", "hidden", "inner"), [("linformer_base", 12, 768, 3072), ("linformer_large", 24, 1024, 4096)]
)
def test_presets_have_the_parameters_of_their_shapes(preset: str, layers: int, hidden: int, inner: int) -> None:
    """Those of RoBERTa, and one matrix of 512 × 128 = 65,536 numbers, or as many as the sharing mode has."""
    for sharing, maps in (("layerwise", 1), ("kv", layers), ("headwise", 2 * layers)):
        config = getattr(hea.CompressedTransformerConfig, preset)(projection_sharing=sharing)
        with torch.device("meta"):
            model = hea.CompressedTransformerModel(config)
        block = 4 * (hidden * hidden + hidden) + 2 * hidden * inner + hidden + inner + 4 * hidden
        embeddings = (50_265 + 514 + 2) * hidden
        expected = embeddings + layers * block + maps * 65_536
        assert sum(parameter.numel() for parameter in model.parameters()) == expected


@pytest.mark.parametrize(
    ("preset", "vocabulary", "positions", "types", "kernels"),
    [("performer_base", 50_265, 514, 0, 0), ("nystromformer_base", 30_000, 4098, 2, 12 * 12 * 65)],
)
def test_presets_have_the_parameters_of_encoders_of_their_size(
    preset: str, vocabulary: int, positions: int, types: int, kernels: int
) -> None:
    """Those of BERT-base, and of convolutions; random features are no parameters."""
    with torch.device("meta"):
        model = hea.CompressedTransformerModel(getattr(hea.CompressedTransformerConfig, preset)())
    block = 4 * (768 * 768 + 768) + 2 * 768 * 3072 + 3072 + 768 + 4 * 768
    expected = (vocabulary + positions + types + 2) * 768 + 12 * block + kernels
    assert sum(parameter.numel() for parameter in model.parameters()) == expected


def test_linformer_is_an_alias_that_no_config_of_transformers_collides_with() -> None:
    config = hea.CompressedTransformerConfig.linformer(**TINY, projected_tokens=4)
    assert config.to_dict() == hea.CompressedTransformerConfig(**TINY, projected_tokens=4).to_dict()
    assert config.model_type == "compressed_transformer"
    with pytest.raises(TypeError, match="'mechanism'"):
        hea.CompressedTransformerConfig.linformer(mechanism="linear")


def test_nystromformer_has_as_many_parameters_as_that_of_transformers() -> None:
    with torch.device("meta"):
        ours = hea.CompressedTransformerModel(hea.CompressedTransformerConfig.nystromformer_base())
        theirs = NystromformerModel(NystromformerConfig(max_position_embeddings=4096))
    counts = [sum(parameter.numel() for parameter in model.parameters()) for model in (ours, theirs)]
    assert counts == [111_254_160] * 2


@pytest.mark.parametrize("tokens", [8, 10])
def test_positions_are_one_for_each_token(tokens: int) -> None:
    for positions in (torch.arange(tokens)[None], torch.arange(9), torch.arange(9).expand(3, -1)):
        with pytest.raises(hea.InputError, match=r"it must be \[2 or 1, 9\], a position for each new token"):
            build("AutoModel")(random_ids(2, 9), position_ids=positions)


@torch.no_grad()
def test_masked_tokens_between_others_keep_their_places_in_patterns_alone() -> None:
    """As the card says: sums over a text, and not patterns, are those of the text without them."""
    ids, mask = random_ids(1, 9), torch.ones(1, 9, dtype=torch.long)
    mask[0, 4] = 0
    for mechanism, is_without in (("linear", True), ("linformer", True), ("memory_compressed", True), ("prior", False)):
        model = build("AutoModel", mechanism=mechanism, position_embedding_type="none")
        found = model(ids, attention_mask=mask).last_hidden_state[mask.bool()]
        assert torch.allclose(found, model(ids[mask.bool()][None]).last_hidden_state[0], atol=1e-5) == is_without


def test_layers_with_a_pattern_are_those_of_the_sparse_transformer() -> None:
    """And so a model of such layers alone is one."""
    model = build("AutoModel", mechanism="pattern", attention_pattern=Band(2, 1))
    sparse = hea.SparseTransformerModel(hea.SparseTransformerConfig(**TINY, attention_pattern=Band(2, 1))).eval()
    sparse.load_state_dict(model.state_dict())
    ids = random_ids(2, 9)
    torch.testing.assert_close(model(ids).last_hidden_state, sparse(ids).last_hidden_state)
