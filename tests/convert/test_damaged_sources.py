"""Damaged sources and impossible destinations: one sentence of this package each, and nothing is written."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from in_tree_models import in_tree
from safetensors.torch import load_file, save_file

import hf_efficient_attn as hea
from hf_efficient_attn import cli

pytestmark = pytest.mark.filterwarnings("ignore:Left out, because sparse")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "bert"
    in_tree("bert").save_pretrained(folder)
    return folder


@pytest.fixture
def bert(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "bert"))


def fields(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))

    return change


def whole_config(text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "config.json").write_text(text) and None


def weights(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return changed


def pickled(content: bytes) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "pytorch_model.bin").write_bytes(content)

    return change


def cut_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def weights_are_a_folder(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()


def weights_are_a_loop(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("model.safetensors")


def shard_is_missing(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    in_tree("bert").save_pretrained(folder, max_shard_size="20kB")
    next(folder.glob("model-00002-of-*.safetensors")).unlink()


def damaged_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")


EMBEDDING = "embeddings.word_embeddings.weight"
FAULTS = {
    "an unknown type": (fields(model_type="gpt2"), "model_type"),
    "no config": (lambda folder: (folder / "config.json").unlink(), r"no config\.json"),
    "a list of types": (fields(model_type=["a"]), r"model_type=\['a'\]; it must be a name"),
    "no classes": (fields(architectures=[3]), r"architectures=\[3\]; it must be a list of class names"),
    "null": (whole_config("null"), "config.json of .* is damaged"),
    "a list": (whole_config("[1]"), "config.json of .* is damaged"),
    "deep": (whole_config("[" * 100_000), "config.json of .* is damaged"),
    "kernel": (
        fields(_attn_implementation="kernels-community/flash-attn"),
        "not an attention implementation of transformers",
    ),
    "quantized": (fields(quantization_config={"quant_method": "x"}), r"are quantized .*'quant_method': 'x'"),
    "integer dtype": (fields(dtype="int8"), "cannot be read"),
    "no pickle": (pickled(b"text"), "cannot be read"),
    "a pickle of something else": (pickled(pickle.dumps(print, 2)), "not a file of torch.save"),
    "empty pickle": (pickled(b""), "pytorch_model.bin|cannot be read"),
    "cut": (cut_weights, "cannot be read: SafetensorError"),
    "folder": (weights_are_a_folder, "cannot be read"),
    "loop": (weights_are_a_loop, "cannot be read"),
    "shard": (shard_is_missing, r"cannot be read: .*model-00002-of-"),
    "missing": (
        weights(lambda all: all.pop("encoder.layer.1.output.dense.weight")),
        r"missing: encoder\.layer\.\*\.output\.dense\.weight",
    ),
    "unexpected": (weights(lambda all: all.update(extra=torch.zeros(3))), "unexpected: extra"),
    "shape": (
        weights(lambda all: all.update({EMBEDDING: torch.zeros(3, 32)})),
        "with another shape than in the config",
    ),
    "integers": (
        weights(lambda all: all.update({name: each.to(torch.int8) for name, each in all.items()})),
        "integers",
    ),
    "some integers": (weights(lambda all: all.update({EMBEDDING: all[EMBEDDING].to(torch.int8)})), "integers"),
    "tokenizer": (damaged_tokenizer, "The tokenizer in .* cannot be read"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_said_and_nothing_is_written(bert: Path, tmp_path: Path, fault: str) -> None:
    change, message = FAULTS[fault]
    change(bert)
    with pytest.raises(hea.EfficientAttentionError, match=message) as error:
        hea.convert(bert, tmp_path / "new")
    assert len(str(error.value)) <= 500
    assert not (tmp_path / "new").exists()


def test_the_command_ends_with_the_fault(bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cut_weights(bert)
    with pytest.raises(SystemExit) as end:
        cli.main(["convert", str(bert), str(tmp_path / "new")])
    assert end.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("note: ")]
    assert lines[-1].startswith("hf-efficient-attn: error: ")
    assert "cannot be read: SafetensorError" in lines[-1]
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a\0b", "embedded null"),
        ("x" * 300, "a name of 300 bytes"),
        ("loop/new", "cannot be a folder|cannot be created"),
    ],
)
def test_impossible_destinations(bert: Path, tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(hea.ConfigurationError, match=message):
        hea.convert(bert, f"{tmp_path}/{name}")


@pytest.mark.filterwarnings("ignore:Even with parity")
def test_numbers_that_are_none_are_said(bert: Path) -> None:
    weights(lambda all: all[EMBEDDING].fill_(torch.nan))(bert)
    with pytest.warns(UserWarning, match=f"Not finite .*: {EMBEDDING}") as notes:
        hea.convert(bert, parity=True)
    assert any("not compared with the source's, because those are not finite" in str(note.message) for note in notes)


def test_a_model_without_numbers() -> None:
    with torch.device("meta"):
        model = type(in_tree("bert"))(in_tree("bert").config)
    with pytest.raises(hea.CheckpointError, match="on the meta device, without values"):
        hea.convert(model)


def test_weights_that_differ_are_not_tied(tmp_path: Path) -> None:
    """Where both are saved, transformers loads them untied whatever the config says; ours would lose one of them."""
    in_tree("bert", "AutoModelForMaskedLM", tie_word_embeddings=False).save_pretrained(tmp_path / "bert")
    fields(tie_word_embeddings=True)(tmp_path / "bert")
    with pytest.raises(hea.CheckpointError, match=r"lm_head\.weight and model\.embed_tokens\.weight\. Set tie_word_em"):
        hea.convert(tmp_path / "bert", tmp_path / "new")
    assert not (tmp_path / "new").exists()
    fields(tie_word_embeddings=False)(tmp_path / "bert")
    assert not hea.convert(tmp_path / "bert").config.tie_word_embeddings


@pytest.mark.parametrize("name", ["a\0b", "x" * 300, "", "no such name"])
def test_impossible_sources(tmp_path: Path, name: str) -> None:
    with pytest.raises(hea.CheckpointError, match=r"no folder|not a folder|cannot be looked up"):
        hea.convert(name, tmp_path / "new")
