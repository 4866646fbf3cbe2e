"""A copy of each example alone, in a folder of its own, on files of its user, on one process and on two."""

import json
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from distributed import start_distributed
from own_files import OWN, own, rows, write_own_files
from run_example import EXAMPLES, command, environment, finish_example, start_forked, write_rows


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    write_own_files(folder)
    return folder


@pytest.fixture
def folder(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An own folder with the files, in which the test runs."""
    monkeypatch.chdir(shutil.copytree(files, tmp_path / "own"))
    return tmp_path / "own"


def test_every_example_is_tried() -> None:
    assert {*OWN, "sparsify_llama"} == {script.stem for script in EXAMPLES.glob("*.py")}


def on_two_processes(script: Path, arguments: list[str], folder: Path) -> str:
    """Run a script as torchrun does; return what both processes printed."""
    words = command(str(script), tuple(arguments))
    scripts, _store = start_distributed(words, folder, env=environment(folder))
    printed = "\n".join(each.communicate()[0] for each in scripts)
    assert [each.returncode for each in scripts] == [0, 0], printed
    return printed


def some(*often: str) -> list[Any]:
    """Return the examples, of which the others are thorough."""
    return [pytest.param(name, marks=() if name in often else pytest.mark.thorough) for name in OWN]


# one of each trainer: that of encoder-decoders is one of Trainer, too
@pytest.mark.parametrize("script", some("run_seq2seq", "run_sentence_embeddings"))
def test_a_copy_trains_on_two_processes(script: str, folder: Path) -> None:
    copy = Path(shutil.copy(EXAMPLES / f"{script}.py", folder))
    printed = on_two_processes(copy, own(script, "--save_strategy", "no"), folder)
    assert "pin_memory" not in printed
    results = json.loads((folder / "run" / "all_results.json").read_text())
    assert "train_runtime" in results
    assert len(list((folder / "run").glob("*model.safetensors"))) == 1


# test_run_*.py train and evaluate all, not one without the other
@pytest.mark.parametrize("script", some("run_qa", "run_lora"))
def test_a_copy_trains_or_evaluates_as_told(script: str, folder: Path) -> None:
    copy = shutil.copy(EXAMPLES / f"{script}.py", folder)
    finish_example(start_forked(folder, copy, *own(script, "--do_eval", "False")))
    assert not (folder / "run" / "eval_results.json").exists()
    (weights,) = (folder / "run").glob("*model.safetensors")
    written = weights.stat().st_mtime_ns
    finish_example(start_forked(folder, copy, *own(script, "--do_train", "False")))
    assert (folder / "run" / "eval_results.json").exists()
    assert weights.stat().st_mtime_ns == written


@pytest.mark.parametrize(
    ("script", "more"),
    [
        ("run_classification", ["--model_name_or_path", "bert"]),
        ("run_qa", ["--model_name_or_path", "bert"]),
        ("run_clm", ["--block_size", "9000"]),
        ("run_lora", ["--block_size", "9000"]),
    ],
)
def test_texts_longer_than_a_model_takes_are_an_error(
    script: str, more: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [script, "--output_dir", "run", *own(script, *more)])
    with pytest.raises((RuntimeError, ValueError, IndexError)):
        runpy.run_path(str(EXAMPLES / f"{script}.py"), run_name="__main__")
    assert not [*folder.glob("run/*.safetensors")]


@pytest.mark.parametrize(
    ("label", "more"), [("new", ["--validation_file", "other.jsonl"]), (None, ["--train_file", "other.jsonl"])]
)
def test_a_label_that_is_no_class_is_an_error(
    label: str | None, more: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(folder / "other.jsonl", [*rows(40), {**rows(1)[0], "label": label}])
    monkeypatch.setattr(sys, "argv", ["run_classification", "--output_dir", "run", *own("run_classification", *more)])
    with pytest.raises((TypeError, ValueError)):
        runpy.run_path(str(EXAMPLES / "run_classification.py"), run_name="__main__")
