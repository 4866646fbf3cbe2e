"""A copy of each example alone, in a folder of its own, on files of its user, on one process and on two."""

import json
import re
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from distributed import start_distributed
from own_files import OWN, own, rows, write_own_files
from run_example import EXAMPLES, command, environment, finish_example, start_forked, write_rows
from transformers import AutoTokenizer


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


# one of each trainer
@pytest.mark.parametrize("script", some("run_clm", "run_summarization", "run_sentence_embeddings"))
def test_a_copy_trains_on_two_processes(script: str, folder: Path) -> None:
    copy = Path(shutil.copy(EXAMPLES / f"{script}.py", folder))
    printed = on_two_processes(copy, own(script, "--save_strategy", "no"), folder)
    assert "pin_memory" not in printed
    results = json.loads((folder / "run" / "all_results.json").read_text())
    assert "train_runtime" in results
    assert len(list((folder / "run").glob("*model.safetensors"))) == 1


# test_run_*.py train and evaluate all, not one without the other
@pytest.mark.parametrize("script", some("run_qa", "run_lora", "run_translation", "run_sentence_embeddings"))
def test_a_copy_trains_or_evaluates_as_told(script: str, folder: Path) -> None:
    copy = shutil.copy(EXAMPLES / f"{script}.py", folder)
    finish_example(start_forked(folder, copy, *own(script, "--do_eval", "False", "--do_predict", "False")))
    assert not (folder / "run" / "eval_results.json").exists()
    (weights,) = (folder / "run").glob("*model.safetensors")
    written = weights.stat().st_mtime_ns
    finish_example(start_forked(folder, copy, *own(script, "--do_train", "False", "--do_predict", "False")))
    assert (folder / "run" / "eval_results.json").exists()
    assert weights.stat().st_mtime_ns == written


def refused(script: str, *more: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the sentence by which an example refuses its input."""
    monkeypatch.setattr(sys, "argv", [script, "--output_dir", "run", *own(script, *more)])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(EXAMPLES / f"{script}.py"), run_name="__main__")
    assert isinstance(stop.value.code, str)
    assert "\n" not in stop.value.code
    return stop.value.code


@pytest.mark.parametrize("script", sorted(OWN))
def test_files_that_hold_too_little_are_refused(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sentence(name: str, found: list[dict]) -> str:
        write_rows(folder / name, found)
        return refused(script, "--train_file", name, monkeypatch=monkeypatch)

    write_rows(folder / "empty.jsonl", [])
    message = refused(script, "--train_file", "empty.jsonl", monkeypatch=monkeypatch)
    assert re.fullmatch(r"No rows of (\.\w+, )*\.\w+ or \.\w+ in empty\.jsonl\.", message)
    assert "a single row" in sentence("one.jsonl", rows(1)).lower()
    assert "other" in sentence("other.jsonl", [{"other": 1}] * 20) or script == "run_translation"


LENGTHS = {"run_clm": "block_size", "run_lora": "block_size", "run_summarization": "max_source_length"}
LENGTHS |= {"run_translation": "max_source_length"}


@pytest.mark.parametrize("script", sorted(OWN))
def test_wrong_options_are_refused(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for option in ("max_train_samples", "max_eval_samples", LENGTHS.get(script, "max_seq_length")):
        for value in ("0", "-4"):
            message = refused(script, f"--{option}", value, monkeypatch=monkeypatch)
            assert message == f"--{option} {value}: it must be at least 1."
    message = refused(script, "--validation_file", "nowhere.jsonl", monkeypatch=monkeypatch)
    assert message == "There is no file nowhere.jsonl here."
    message = refused(script, "--model_name_or_path", "no/folder/here", monkeypatch=monkeypatch)
    assert message.startswith("--model_name_or_path 'no/folder/here' is no folder here")


@pytest.mark.parametrize("script", sorted({*OWN} - {"run_mlm", "run_sentence_embeddings"}))
def test_texts_longer_than_a_model_reads_are_refused(
    script: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, option = OWN[script][0], LENGTHS.get(script, "max_seq_length")
    # the shortest limit of all; test_script_inputs.py tries those of configs
    file = folder / checkpoint / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "model_max_length": 4}))
    message = refused(script, monkeypatch=monkeypatch)
    assert re.fullmatch(
        rf"The longest text has (\d+) tokens, {checkpoint} reads 4: make it longer by `hf-efficient-attn convert "
        rf"{checkpoint} FOLDER --max-position-embeddings \1`, or give --{option} 4\.",
        message,
    )


@pytest.mark.parametrize("script", sorted(OWN))
def test_data_that_would_be_ignored_is_refused(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = "Give --dataset_name (and its --dataset_config_name) or --train_file (and --validation_file)."
    for more in (
        ["--dataset_name", "imdb"],
        ["--dataset_config_name", "en"],
        ["--train_file", "", "--validation_file", "rows.jsonl"],
        ["--train_file", "", "--validation_file", "rows.jsonl", "--dataset_name", "imdb"],
        ["--train_file", "", "--dataset_config_name", "en"],
    ):
        assert refused(script, *more, monkeypatch=monkeypatch) == message


@pytest.mark.parametrize("script", ["run_clm", "run_mlm"])
def test_a_family_beside_a_checkpoint_is_refused(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = refused(script, "--model_type", "llama", monkeypatch=monkeypatch)
    assert message == "--model_type is for a new model, --model_name_or_path is a checkpoint: give one of them."


@pytest.mark.parametrize(
    ("script", "changed", "message"),
    [
        ("run_classification", {"label": None}, "A row has no label: leave it out."),
        ("run_classification", {"text": None}, "A row has no text: leave it out."),
        ("run_classification", {"label": "rare"}, "Class rare has a single row: more rows or a --validation_file"),
        ("run_token_classification", {"ner_tags": ["O"]}, "A row of 40 words has more or fewer labels: w0 w"),
        ("run_token_classification", {"tokens": None}, "A row has no tokens: leave it out."),
        ("run_summarization", {"summary": None, "text": "  "}, "A row has no text and no summary: leave it out."),
        ("run_sentence_embeddings", {"query": ""}, "A row has no query: leave it out."),
        ("run_translation", {"translation": {"en": "a"}}, "A row is not in both languages: leave it out."),
        ("run_translation", {"translation": {"en": "a", "de": ""}}, "A row has no target: leave it out."),
        ("run_qa", {"question": " "}, "A row has no question: leave it out."),
        ("run_qa", {"answers": {"text": ["w1"], "answer_start": [999]}}, "Answer 'w1' is not at character 999"),
    ],
)
def test_a_wrong_row_is_refused(
    script: str, changed: dict, message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_rows = rows(40)
    own_rows[7] |= changed
    write_rows(folder / "rows.jsonl", own_rows)
    assert message in refused(script, monkeypatch=monkeypatch)


@pytest.mark.parametrize(
    ("script", "of_all_rows", "more", "message"),
    [
        ("run_classification", {"label": "ham"}, [], "train rows are of one class"),
        ("run_classification", {}, ["--max_eval_samples", "1"], "All 1 validation rows are of one class"),
        ("run_classification", {}, ["--label_column", "kind"], "No column is called kind (--label_column)"),
        ("run_classification", {}, ["--text_column", "body"], "No column is called body (--text_column)"),
        ("run_classification", {"text": 1}, [], "text must hold strings, not Value('int64')"),
        ("run_classification", {"label": ["ham"]}, [], "and label a class, not List(Value('string'))"),
        ("run_token_classification", {"tokens": "a b"}, [], "No column of lists is called tokens"),
        ("run_summarization", {}, ["--text_column", "page"], "No column is called page (--text_column)"),
        ("run_translation", {}, ["--target_lang", "fr"], "No `translation` is in fr; there is en, de."),
        ("run_qa", {"question": "a " * 99}, [], "max_seq_length must exceed "),
        ("run_sentence_embeddings", {"document": "w1 w2"}, [], "All queries of validation have the same document"),
        ("run_lora", {}, ["--do_train", "False"], "run holds no adapter that could be evaluated: train one first."),
        ("run_clm", {}, ["--block_size", "9000"], "There are no train blocks"),
        ("run_lora", {}, ["--block_size", "9000"], "There are no train blocks"),
        ("run_mlm", {}, ["--max_seq_length", "9000"], "There are no train blocks"),
    ],
)
def test_wrong_columns_and_too_little_are_refused(
    script: str, of_all_rows: dict, more: list[str], message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(folder / "rows.jsonl", [{**row, **of_all_rows} for row in rows(40)])
    assert message in refused(script, *more, monkeypatch=monkeypatch)


def test_a_class_of_validation_alone_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(folder / "other.jsonl", [*rows(4), {**rows(1)[0], "label": "new"}])
    message = refused("run_classification", "--validation_file", "other.jsonl", monkeypatch=monkeypatch)
    assert message == "No train row, but a validation row is of class new."


def test_a_tokenizer_without_frame_makes_blocks_of_masked_text(folder: Path) -> None:
    file = folder / "bert" / "tokenizer_config.json"
    config = json.loads(file.read_text())
    file.write_text(
        json.dumps({name: value for name, value in config.items() if name not in ("cls_token", "sep_token")})
    )
    assert AutoTokenizer.from_pretrained(folder / "bert").cls_token_id is None
    finish_example(start_forked(folder, "run_mlm.py", *own("run_mlm", "--do_eval", "False")))
