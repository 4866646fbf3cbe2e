"""Models of one config object: `sparsify` changes the one that it is given, and its parts and wholes."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tr
from attention_models import PATTERN, inputs_of, outputs_of
from attention_models import new as build

import hf_efficient_attn as hea
from hf_efficient_attn.patterns import Band


@pytest.mark.parametrize("name", ["llama", "bert", "t5", "bart"])
def test_other_models_of_the_config_go_on_as_they_are(name: str, tmp_path: Path) -> None:
    dense = build(name)
    other = type(dense)(dense.config).eval()
    other.load_state_dict(dense.state_dict())
    assert other.config is dense.config
    inputs = inputs_of(name, "left")
    before = outputs_of(dense, inputs)
    alone = outputs_of(hea.sparsify(build(name), PATTERN), inputs)
    sparse = hea.sparsify(other, PATTERN)
    sparse.load_state_dict(dense.state_dict())
    torch.testing.assert_close(outputs_of(dense, inputs), before)
    assert not hasattr(dense.config, "attention_pattern")
    assert dense.config._attn_implementation != "efficient"
    assert not torch.allclose(outputs_of(sparse, inputs), before)
    assert outputs_of(sparse, inputs).shape == alone.shape
    # all its parts hold the copies
    dense.save_pretrained(tmp_path)
    assert "attention_pattern" not in (tmp_path / "config.json").read_text(encoding="utf-8")
    held = {id(each) for module in dense.modules() for each in configs_of(module)}
    assert not any(id(each) in held for module in sparse.modules() for each in configs_of(module))
    hea.sparsify(sparse, None)
    torch.testing.assert_close(outputs_of(sparse, inputs), before)
    assert sparse.config._attn_implementation == dense.config._attn_implementation


def configs_of(module: torch.nn.Module) -> list[Any]:
    return [value for value in vars(module).values() if isinstance(value, tr.PreTrainedConfig)]


def test_one_model_keeps_its_config() -> None:
    model = build("llama")
    config = model.config
    hea.sparsify(model, PATTERN)
    assert model.config is config


def test_the_whole_of_a_part_gets_the_same_copy() -> None:
    whole = build("llama")
    other = type(whole)(whole.config)
    hea.sparsify(whole.model, Band(3, 0))
    assert whole.config is whole.model.config is whole.model.layers[0].self_attn.config
    assert whole.config.attention_pattern == Band(3, 0).to_dict()
    assert not hasattr(other.config, "attention_pattern")
    # and so does the part of the whole
    hea.sparsify(other, Band(2, 0))
    assert other.model.config.attention_pattern == Band(2, 0).to_dict()
    assert whole.config.attention_pattern == Band(3, 0).to_dict()
