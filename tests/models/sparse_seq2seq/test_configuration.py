"""Presets, their parameter counts and start values, and what no model can be built from."""

import math
from typing import Any

import pytest
import torch
from torch import nn

import hf_efficient_attn as hea

Config = hea.SparseSeq2SeqConfig


def count(model: nn.Module, matrices: bool) -> int:
    """Return the number of weights in matrices, or in vectors (biases and norms)."""
    return sum(each.numel() for each in model.parameters() if (each.ndim >= 2) is matrices)


def on_meta(config: Any) -> Any:
    with torch.device("meta"):
        return hea.SparseSeq2SeqForConditionalGeneration(config)


@pytest.mark.parametrize(("size", "width", "matrices"), [("base", 512, 62_984_192), ("big", 1024, 214_048_768)])
def test_vanilla_has_the_parameters_of_the_paper(size: str, width: int, matrices: int) -> None:
    """Matrices by hand: 6 encoder layers of 4d² + 8d², 6 decoder layers of 8d² + 8d², one embedding of 37,000·d.

    The paper's 65M and 213M are of its own vocabularies, and do not say what is counted. Vectors: a norm has 2d, an
    attention 4d biases, an MLP 4d + d.
    """
    assert 6 * 12 * width**2 + 6 * 16 * width**2 + 37_000 * width == matrices
    model = on_meta(Config.vanilla(size))
    assert count(model, matrices=True) == matrices
    encoder, decoder = 4 + 5 + 2 * 2, 8 + 5 + 3 * 2
    assert count(model, matrices=False) == 6 * (encoder + decoder) * width


@pytest.mark.parametrize(("size", "layers", "width"), [("base", 6, 768), ("large", 12, 1024)])
def test_led_has_the_shape_of_the_released_models(size: str, layers: int, width: int) -> None:
    """BART's parameters, plus position tables of 16,384 and 1,024 rows, a second set of projections, and the bias."""
    model = on_meta(Config.led(size))
    attention, norm = 4 * width**2 + 4 * width, 2 * width
    mlp = 8 * width**2 + 5 * width
    encoder = layers * (attention + 3 * (width**2 + width) + mlp + 2 * norm)
    decoder = layers * (2 * attention + mlp + 3 * norm)
    tables = (50_265 + 16_384 + 1024) * width + 2 * norm
    assert sum(each.numel() for each in model.parameters()) == encoder + decoder + tables + 50_265
    assert [len(model.model.encoder.layers), len(model.model.decoder.layers)] == [layers, layers]
    config = model.config
    assert config.attention_pattern == {"encoder": {"kind": "band", "left": 512, "right": 512}, "decoder": None}
    assert (config.global_tokens, config.global_projections, config.scale_embedding) == ("first", True, False)


def test_bigbird_pegasus_has_no_attention_biases_and_a_norm_behind_each_stack() -> None:
    model = on_meta(Config.bigbird_pegasus())
    names = dict(model.named_parameters())
    assert not [name for name in names if "attn" in name and name.endswith("bias")]
    assert {"model.encoder.norm.weight", "model.decoder.norm.weight"} <= names.keys()
    assert (model.config.encoder_layers, model.config.decoder_layers, model.config.hidden_size) == (16, 16, 1024)


def test_start_values_of_the_original_transformer() -> None:
    """Scaled embeddings of variance 1 (padding 0), Glorot's matrices, biases 0."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 4, "vocab_size": 2000}
    model = hea.SparseSeq2SeqForConditionalGeneration(Config.vanilla(**sizes))
    embedded = model.model.embed_tokens.weight
    assert (embedded[1:].std() * 8).item() == pytest.approx(1, rel=0.02)
    assert not embedded[0].any()
    assert model.lm_head.weight is embedded
    matrix = model.model.encoder.layers[0].mlp.up_proj.weight
    limit = math.sqrt(6 / (64 + 256))
    assert 0.95 * limit < matrix.abs().max().item() <= limit
    assert matrix.std().item() == pytest.approx(limit / math.sqrt(3), rel=0.03)
    assert not model.model.decoder.layers[0].cross_attn.q_proj.bias.any()


def test_global_projections_start_as_copies() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "vocab_size": 50}
    for matrix_init in ("normal", "glorot"):
        config = Config.led(attention_window=4, max_position_embeddings=16, matrix_init=matrix_init, **sizes)
        attention = hea.SparseSeq2SeqModel(config).encoder.layers[1].self_attn
        assert torch.equal(attention.global_attention.k_proj.weight, attention.k_proj.weight)


def test_options_of_the_original_transformer() -> None:
    config = Config.vanilla(norm_position="pre", position_embedding_type="learned", max_position_embeddings=9)
    model = on_meta(config)
    assert isinstance(model.model.encoder.norm, nn.LayerNorm)
    assert model.model.encoder.embeddings.positions.table.weight.shape == (9, 512)
    assert model.model.decoder.embeddings.positions.table.weight.shape == (1024, 512)
    assert isinstance(on_meta(Config.vanilla()).model.decoder.norm, nn.Identity)
