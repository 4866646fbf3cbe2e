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
# what a user without the package finds, who trusts nobody, and then the copies
LOADING = """
import json, sys, torch, transformers
from sharing.stub_client import NotInstalled
sys.meta_path.insert(0, NotInstalled())
models = {place: getattr(transformers, name).from_pretrained for place, name in json.loads(sys.argv[1]).items()}
refused = {}
for folder in [f"{place}/{kind}" for place in models for kind in ("stub", "copy")]:
    try:
        refused[folder] = f"loaded {models[folder.partition('/')[0]](folder)}"
    except ValueError as error:
        refused[folder] = str(error)
for place, load in models.items():
    model = load(f"{place}/copy", trust_remote_code=True)
    with torch.no_grad():
        torch.save(model(**torch.load(f"{place}/inputs.pt")).logits, f"{place}/logits.pt")
print("\\n" + json.dumps(refused))
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


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with those of the models: each as "stub" and as "copy", with what it computes."""
    place = tmp_path_factory.mktemp("parts")
    for name, (build, _, inputs, _) in MODELS.items():
        torch.manual_seed(0)
        model = build().eval()
        for matrix in (each for each in model.parameters() if each.ndim > 1):
            torch.nn.init.normal_(matrix, std=0.2)
        model.save_pretrained(place / name / "stub")
        with torch.no_grad():
            logits = model(**inputs).logits
            full = hea.sparsify(build(), None).eval()
            full.load_state_dict(model.state_dict())
            assert not torch.allclose(full(**inputs).logits, logits, atol=1e-3)
        torch.save(inputs, place / name / "inputs.pt")
        torch.save(logits, place / name / "expected.pt")
        hea.hub.include_code(model).save_pretrained(place / name / "copy")
    return place


@pytest.fixture(scope="module")
def refused(place: Path) -> dict[str, str]:
    """What is said to a user without the package, by folder; what copies compute there is left beside them."""
    words = [sys.executable, "-c", LOADING, json.dumps({name: each[1] for name, each in MODELS.items()})]
    done = run_fresh(words, place, {**os.environ, "HF_HOME": str(place / ".cache")})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("folder", ["stub", "copy"])
def test_a_part_keeps_its_pattern(place: Path, refused: dict[str, str], name: str, folder: str) -> None:
    _, auto_class, inputs, implementation = MODELS[name]
    config = json.loads((place / name / folder / "config.json").read_text())
    assert config["attn_implementation"] == implementation
    model = getattr(transformers, auto_class).from_pretrained(place / name / folder).eval()
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, torch.load(place / name / "expected.pt"))
        model.set_attn_implementation("sdpa")
        with pytest.raises(hea.UnsupportedBackendError, match="has an attention_pattern"):
            model(**inputs)
    # without a word of it, nothing loads full attention
    assert 'attn_implementation="hf_efficient_attn"` is not supported' in refused[f"{name}/{folder}"]


@pytest.mark.parametrize("name", MODELS)
def test_a_copy_loads_without_the_package(place: Path, refused: dict[str, str], name: str) -> None:
    assert torch.equal(torch.load(place / name / "logits.pt"), torch.load(place / name / "expected.pt"))


@pytest.mark.parametrize("name", MODELS)
def test_a_copy_without_its_pattern_names_no_code(place: Path, name: str, tmp_path: Path) -> None:
    auto_class = getattr(transformers, MODELS[name][1])
    model = auto_class.from_pretrained(place / name / "copy")
    hea.sparsify(model, None).save_pretrained(tmp_path / "dense")
    config = json.loads((tmp_path / "dense" / "config.json").read_text())
    assert not {"auto_map", "attn_implementation"} & config.keys()
    auto_class.from_pretrained(tmp_path / "dense", trust_remote_code=True)
