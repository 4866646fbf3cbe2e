"""Configurations that no compressed Transformer can have are refused with a sentence; presets have their shapes."""

from typing import Any

import pytest
import torch
from models.compressed_transformer.tiny_models import build, random_ids
from models_cases import TINY

import hf_efficient_attn as hea
from hf_efficient_attn.patterns import Band

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"mechanism": "linfomer"}, "Did you mean 'linformer'"),
    ({"mechanism": ["linformer"]}, "lists 1 mechanisms for 2 layers"),
    ({"is_causal": True}, "each of its projected keys is a sum over the whole text"),
    ({"attention_pattern": Band(1, 1)}, "no layer follows a pattern"),
    ({"position_embedding_type": "rope"}, "must be one of: learned, sinusoidal, none"),
    ({"projected_tokens": 65}, "more than the max_position_embeddings=64"),
    ({"projected_tokens": [4]}, "lists 1 numbers for 2 layers"),
    ({"projected_tokens": [4, 5], "projection_sharing": "layerwise"}, "gives all of them one matrix"),
    ({"projected_tokens": 5, "projection_type": "mean"}, "does not divide 64"),
    ({"projection_type": "mean", "projection_bias": True}, "has no parameters"),
    ({"projection_first": True, "projection_sharing": "none"}, "not cut into heads yet"),
    ({"mechanism": "nystrom", "num_landmarks": 65}, "more than the max_position_embeddings=64"),
    ({"compression_tokens": 0}, "must be at least 1"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=[str(fields) for fields, _ in REFUSED])
def test_fields_that_exclude_each_other(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(hea.ConfigurationError, match=message):
        hea.CompressedTransformerConfig(**{**TINY, "projected_tokens": 4, **fields})


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


def test_layers_with_a_pattern_are_those_of_the_sparse_transformer() -> None:
    """And so a model of such layers alone is one."""
    model = build("AutoModel", mechanism="pattern", attention_pattern=Band(2, 1))
    sparse = hea.SparseTransformerModel(hea.SparseTransformerConfig(**TINY, attention_pattern=Band(2, 1))).eval()
    sparse.load_state_dict(model.state_dict())
    ids = random_ids(2, 9)
    torch.testing.assert_close(model(ids).last_hidden_state, sparse(ids).last_hidden_state)


def test_explain_says_what_each_mechanism_computes() -> None:
    with pytest.raises(hea.UnsupportedBackendError, match=r"256 scores of a head for 64 tokens, where full"):
        hea.explain(build(), 64)
