"""Paper defaults, presets with their exact sizes (closed form 7), JSON round trip, and every refused combination."""

from pathlib import Path

import pytest
import torch
from models_cases import TINY

import hf_efficient_attn as hea
from hf_efficient_attn.models.simplified_transformer.gains import BLOCK_STYLES, GAIN_SYMBOLS

Config = hea.SimplifiedTransformerConfig


def sizes(config: Config) -> tuple[float, float]:
    """Return millions of parameters, and of numbers in weight matrices other than the position table."""
    model_class = hea.SimplifiedTransformerForCausalLM if config.is_causal else hea.SimplifiedTransformerForMaskedLM
    with torch.device("meta"):
        model = model_class(config)
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "positions" not in name)
    return model.num_parameters() / 1e6, matrices / 1e6


@pytest.mark.parametrize(("block", "millions"), [("pre_ln", 166.74), ("sas", 146.07)])
def test_gpt_18_has_the_papers_size(block: str, millions: float) -> None:
    assert round(sizes(Config.codeparrot_gpt(block))[0], 2) == millions


@pytest.mark.parametrize(("block", "millions"), [("pre_ln", 119.54), ("sas", 101.25)])
def test_bert_16_has_the_papers_size(block: str, millions: float) -> None:
    """The paper's figure counts weight matrices."""
    assert round(sizes(Config.crammed_bert(block))[1], 2) == millions


@pytest.mark.parametrize(("block", "millions"), [("pre_ln", 378.1), ("sas", 293.8)])
def test_depth_72_has_the_papers_size(block: str, millions: float) -> None:
    """The paper's figure counts weight matrices."""
    config = Config.codeparrot_gpt(block, num_hidden_layers=72, intermediate_size=1536)
    assert round(sizes(config)[1], 1) == millions


@pytest.mark.parametrize("block", BLOCK_STYLES)
def test_presets_build(block: str) -> None:
    for preset in (Config.codeparrot_gpt, Config.crammed_bert, Config.languini_gpt):
        assert preset(block, num_hidden_layers=2).block == block


def test_papers_values_of_the_mlp_gain() -> None:
    assert Config.codeparrot_gpt("sas").gain("mlp_gain") == pytest.approx(0.1)
    assert Config.codeparrot_gpt("sas", intermediate_size=1536).gain("mlp_gain") == pytest.approx(0.2)
    deep = Config.codeparrot_gpt("sas", num_hidden_layers=72, intermediate_size=1536)
    assert deep.gain("mlp_gain") == pytest.approx(0.1)
    assert Config.crammed_bert("sas").gain("mlp_gain") == 0.05
    assert Config.codeparrot_gpt("pre_ln").gain("mlp_gain") == 1.0


def test_only_first_layer_keeps_its_value_matrix() -> None:
    config = Config(block="sas")
    assert [config.gain("value_gain", layer) for layer in range(3)] == [1.0, 0.0, 0.0]
    assert Config(block="sas", value_gain=0.2).gain("value_gain", 0) == 0.2
    assert Config(block="sas", first_value_gain=0.0).gain("value_gain", 0) == 0.0


@pytest.mark.parametrize("block", BLOCK_STYLES)
def test_json_round_trip(block: str, tmp_path: Path) -> None:
    config = Config(block=block, trainable_gains=["mlp_gain"], **TINY)
    config.save_pretrained(tmp_path)
    assert Config.from_pretrained(tmp_path).to_dict() == config.to_dict()


def test_whole_numbers_are_numbers() -> None:
    config = Config(mlp_gain=1, attention_dropout=0, query_init_std=0, trainable_gains=("mlp_gain",))
    assert config.gain("mlp_gain") == 1
    model = hea.SimplifiedTransformerModel(Config(mlp_gain=1, softmax_gain=1, **TINY))
    assert model.layers[0].mlp_gain.gain.tolist() == [1.0]


def test_heads_can_be_overridden_after_construction() -> None:
    config = Config()
    config.update_from_string("num_attention_heads=8")
    config.check()
    assert config.key_value_heads == 8


@pytest.mark.parametrize("name", GAIN_SYMBOLS)
def test_every_gain_is_a_field(name: str) -> None:
    assert hasattr(Config(), name)
    with pytest.raises(hea.ConfigurationError, match="Unknown gain"):
        Config().gain(name.upper())
