"""Models of which a part has a pattern, loaded with the package, with a copy of its code, and without both."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from distributed import run_fresh
from transformers import BertConfig, EncoderDecoderConfig, Gemma3Config, SiglipVisionConfig

import hf_efficient_attn as hea
from hf_efficient_attn.patterns import Band

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
IDS = torch.arange(3, 53).view(2, 25)
# what a user without the package finds
LOADING = """
import sys, torch, transformers
from sharing.stub_client import NotInstalled
sys.meta_path.insert(0, NotInstalled())
model = getattr(transformers, sys.argv[2]).from_pretrained(sys.argv[1], trust_remote_code=sys.argv[3] == "trusted")
with torch.no_grad():
    torch.save(model(**torch.load("inputs.pt")).logits, "logits.pt")
"""


def images_and_text() -> Any:
    """Return a model of images and text, of which the text has a pattern."""
    vision = SiglipVisionConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4)
    text = {**SIZES, "head_dim": 8, "pad_token_id": 0, "layer_types": ["full_attention"] * 2}
    config = Gemma3Config(text_config=text, vision_config=vision.to_dict(), image_token_id=63)
    return hea.sparsify(transformers.Gemma3ForConditionalGeneration(config), Band(3, 0))


def two_berts() -> Any:
    """Return an encoder-decoder whose encoder alone has a pattern."""
    decoder = BertConfig(**SIZES, is_decoder=True, add_cross_attention=True)
    config = EncoderDecoderConfig.from_encoder_decoder_configs(BertConfig(**SIZES), decoder)
    model = transformers.EncoderDecoderModel(config)
    hea.sparsify(model.encoder, Band(2, 2))
    return model


MODELS: dict[str, tuple[Callable[[], Any], str, dict[str, torch.Tensor], dict[str, Any]]] = {
    "images and text": (
        images_and_text,
        "AutoModelForImageTextToText",
        {"input_ids": IDS},
        {"text_config": "hf_efficient_attn"},
    ),
    "two BERTs": (
        two_berts,
        "AutoModelForSeq2SeqLM",
        {"input_ids": IDS, "decoder_input_ids": IDS[:, :6]},
        {"encoder": "hf_efficient_attn"},
    ),
}


@pytest.fixture(params=MODELS)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, str, torch.Tensor, Any]:
    """The model, what loads it, what it computes, and what its config is saved with; in "stub" and "copy"."""
    build, auto_class, inputs, implementation = MODELS[request.param]
    torch.manual_seed(0)
    model = build().eval()
    for matrix in (each for each in model.parameters() if each.ndim > 1):
        torch.nn.init.normal_(matrix, std=0.2)
    model.save_pretrained(tmp_path / "stub")
    with torch.no_grad():
        logits = model(**inputs).logits
        full = hea.sparsify(build(), None).eval()
        full.load_state_dict(model.state_dict())
        assert not torch.allclose(full(**inputs).logits, logits, atol=1e-3)
    torch.save(inputs, tmp_path / "inputs.pt")
    hea.hub.include_code(model).save_pretrained(tmp_path / "copy")
    return inputs, auto_class, logits, implementation


def without_package(place: Path, folder: str, auto_class: str, trust: str = "") -> Any:
    words = [sys.executable, "-c", LOADING, folder, auto_class, trust]
    return run_fresh(words, place, {**os.environ, "HF_HOME": str(place / ".cache")})


@pytest.mark.parametrize("folder", ["stub", "copy"])
def test_a_part_keeps_its_pattern(saved: tuple[Any, str, torch.Tensor, Any], folder: str, tmp_path: Path) -> None:
    inputs, auto_class, logits, implementation = saved
    config = json.loads((tmp_path / folder / "config.json").read_text())
    assert config["attn_implementation"] == implementation
    model = getattr(transformers, auto_class).from_pretrained(tmp_path / folder).eval()
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, logits)
        model.set_attn_implementation("sdpa")
        with pytest.raises(hea.UnsupportedBackendError, match="has an attention_pattern"):
            model(**inputs)
    # without a word of it, nothing loads full attention
    refused = without_package(tmp_path, folder, auto_class)
    assert refused.returncode != 0
    assert 'attn_implementation="hf_efficient_attn"` is not supported' in refused.stderr


def test_a_copy_loads_without_the_package(saved: tuple[Any, str, torch.Tensor, Any], tmp_path: Path) -> None:
    done = without_package(tmp_path, "copy", saved[1], "trusted")
    assert done.returncode == 0, done.stderr
    assert torch.equal(torch.load(tmp_path / "logits.pt"), saved[2])


def test_a_copy_without_its_pattern_names_no_code(saved: tuple[Any, str, torch.Tensor, Any], tmp_path: Path) -> None:
    model = getattr(transformers, saved[1]).from_pretrained(tmp_path / "copy")
    hea.sparsify(model, None).save_pretrained(tmp_path / "dense")
    config = json.loads((tmp_path / "dense" / "config.json").read_text())
    assert not {"auto_map", "attn_implementation"} & config.keys()
    getattr(transformers, saved[1]).from_pretrained(tmp_path / "dense", trust_remote_code=True)
