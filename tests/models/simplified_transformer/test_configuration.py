"""Paper defaults, presets with their exact sizes (closed form 7), JSON round trip, and every refused combination."""

from pathlib import Path
from typing import Any

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


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block": "sas-p"}, r"block='sas-p'; it must be one of: pre_ln, .* Did you mean 'sas_p'\?"),
        ({"mlp_gian": 0.1}, "Unknown gain: 'mlp_gian'.*Did you mean 'mlp_gain'"),
        ({"mlp_gains": 0.1}, r"Unknown gain: 'mlp_gains'. Allowed: .* Did you mean 'mlp_gain'\?"),
        ({"trainable_gains": ["beta"]}, "Unknown gain in trainable_gains: 'beta'"),
        (
            {"block": "sas_p", "mlp_skip_gain": 0.5},
            "mlp_skip_gain .* does not exist in block='sas_p'.*combined_skip_gain",
        ),
        ({"block": "sas", "combined_skip_gain": 0.5}, "does not exist in block='sas'"),
        ({"mlp_gain": 0.0, "trainable_gains": []}, "mlp_gain=0 as a constant cuts off"),
        ({"hidden_size": 100, "num_attention_heads": 12}, r"num_attention_heads=12 does not divide.*\[4, 5, 10\]"),
        ({"num_attention_heads": 0}, "num_attention_heads=0 must be at least 1"),
        ({"num_key_value_heads": 4}, "gives each of the 12 heads its own slice"),
        ({"block": "pre_ln", "num_key_value_heads": 4, "matrix_init": "orthogonal"}, "square value matrix"),
        ({"block": "pre_ln", "trainable_gains": ["value_gain"]}, "Set reparameterized=True"),
        ({"intermediate_size": 0}, "intermediate_size=0 must be at least 1"),
        ({"vocab_size": 0}, "vocab_size=0 must be at least 1"),
        ({"pad_token_id": 50_000}, "pad_token_id=50000; it must be None or a token"),
        ({"hidden_dropout": 1.5}, "hidden_dropout=1.5 is a probability"),
        ({"block": "pre_ln", "num_key_value_heads": 5}, "does not divide num_attention_heads=12"),
        ({"block": "pre_ln", "value_gain": 0.5}, "Set reparameterized=True"),
        ({"matrix_init_tie": "all_layers"}, "Set matrix_init='orthogonal'"),
        ({"matrix_init": "normal"}, "'identity' or 'orthogonal'"),
        ({"norm_type": "batchnorm"}, "norm_type='batchnorm'; it must be"),
        ({"hidden_act": "rleu"}, "hidden_act='rleu'; it must be .*Did you mean 'relu'"),
        ({"position_embedding_type": "rotary"}, "position_embedding_type='rotary'; it must be"),
        ({"hidden_size": 9, "num_attention_heads": 3}, "even hidden_size"),
        ({"hidden_size": 12, "num_attention_heads": 4, "position_embedding_type": "rope"}, "even head size"),
    ],
    ids=str,
)
def test_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(hea.ConfigurationError, match=message):
        Config(**fields)


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


def test_wrong_types_are_refused() -> None:
    with pytest.raises(hea.ConfigurationError, match="hidden_size='wide'; it must be int"):
        Config(hidden_size="wide")


@pytest.mark.parametrize("name", GAIN_SYMBOLS)
def test_every_gain_is_a_field(name: str) -> None:
    assert hasattr(Config(), name)
    with pytest.raises(hea.ConfigurationError, match="Unknown gain"):
        Config().gain(name.upper())


def test_change_after_construction_is_checked_when_building() -> None:
    config = Config(**TINY)
    config.block = "sas_q"
    with pytest.raises(hea.ConfigurationError, match="block='sas_q'; it must be"):
        hea.SimplifiedTransformerModel(config)


@pytest.mark.parametrize("spec", [3, {"kind": "star"}, [None, None, 3], hea.patterns.GlobalTokens([-1])], ids=str)
def test_a_pattern_is_checked_when_a_config_is_built(spec: Any) -> None:
    """The family has no such field, but `sparsify` writes it; a causal form that counts from the end is no pattern."""
    with pytest.raises(hea.ConfigurationError, match="pattern"):
        Config(**TINY, attention_pattern=spec)
    config = Config(**TINY)
    config.attention_pattern = spec
    with pytest.raises(hea.ConfigurationError, match="pattern"):
        hea.SimplifiedTransformerModel(config)
