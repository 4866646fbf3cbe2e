"""examples/summarize_man_pages.py and translate_help.py, run as their users run them, at a tiny size."""

import json
from pathlib import Path
from random import Random

import pytest
import torch
from run_example import EXAMPLES, check_refusals, finish_example, start_forked, write_rows
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

import hf_efficient_attn as hea

SHAPE = "hidden_size=16,intermediate_size=32,num_attention_heads=2,encoder_layers=1,decoder_layers=1"
TINY = ["--config_overrides", SHAPE, "--vocab_size", "300", "--max_steps", "6", "--disable_tqdm", "True"]
SUMMARIZE = ["--train_file", "pages.jsonl", "--text_column", "page", "--summary_column", "name", "--num_beams", "2"]
SUMMARIZE += ["--max_source_length", "256", "--short_source_length", "32", "--attention_window", "16"]
SUMMARIZE += ["--max_target_length", "8", "--baseline_words", "3"]
TRANSLATE = ["--train_file", "pairs.jsonl", "--target_lang", "fr", "--max_target_length", "24", "--num_beams", "2"]
TRANSLATE += ["--noam_warmup_steps", "3"]
WORDS = ("file", "line", "queue", "signal", "socket", "clock")


def pages(num: int) -> list[dict]:
    random = Random(0)
    rows = []
    for _ in range(num):
        name = " ".join(random.sample(WORDS, 3))
        rows.append({"page": f"SYNOPSIS\n{name} [option]\n\nDESCRIPTION\n{name} " + "and so on " * 25, "name": name})
    return rows


def sentences(num: int) -> list[dict]:
    return [{"translation": {"en": f"Open the file {i}.", "fr": f"Ouvrez le fichier {i}."}} for i in range(num)]


@pytest.fixture(scope="module")
def summarized(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder and the output of a summarization run from start to end."""
    folder = tmp_path_factory.mktemp("summarized")
    write_rows(folder / "pages.jsonl", pages(30))
    return folder, finish_example(start_forked(folder, "summarize_man_pages.py", *TINY, *SUMMARIZE))


@pytest.fixture(scope="module")
def translated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder and the output of a translation run from start to end."""
    folder = tmp_path_factory.mktemp("translated")
    write_rows(folder / "pairs.jsonl", sentences(40))
    return folder, finish_example(start_forked(folder, "translate_help.py", *TINY, *TRANSLATE))


def test_summaries_leave_what_they_promise(summarized: tuple[Path, str]) -> None:
    folder, output = summarized
    assert {"results.md", "rouge.png", "whole", "start"} <= {file.name for file in (folder / "run").iterdir()}
    first_words, whole, start = json.loads((folder / "run" / "results.json").read_text())["systems"]
    assert first_words["rougeL"] == 1.0  # these pages begin with their name
    assert whole["longest_source_tokens"] > start["longest_source_tokens"] == 32
    for system in (whole, start):
        assert system["reload_difference"] <= 1e-6
        assert len(system["written"]) == 3
        assert [entry["step"] for entry in system["history"] if "eval_rougeL" in entry] == [3, 6]
        assert system["num_different"] == len(set(system["written"]))
    assert "No model here writes better summaries than its first" in output


def test_saved_summarizer_writes_the_reported_summaries(summarized: tuple[Path, str]) -> None:
    folder, _ = summarized
    whole = json.loads((folder / "run" / "results.json").read_text())["systems"][1]
    assert generated(folder / "run" / "whole", pages(30)[0]["page"]) == whole["written"][0]


def generated(folder: Path, source: str) -> str:
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = model.generate(**tokenizer(source, truncation=True, return_tensors="pt"))
    return tokenizer.decode(ids[0], skip_special_tokens=True).strip()


def test_each_row_gets_its_own_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from seq2seq.seq2seq_task import WritingTrainer, WritingTrainingArguments, encode_pairs
    from shared.task_tokenizer import train_task_tokenizer

    texts = [" ".join(["word"] * (1 + 7 * i % 13)) + f" {i}" for i in range(12)]
    tokenizer = train_task_tokenizer(texts, 300, 64, start="")
    fields = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1}
    config = hea.SparseSeq2SeqConfig.vanilla(
        **fields, encoder_layers=1, decoder_layers=1, vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id
    )
    model = hea.SparseSeq2SeqForConditionalGeneration(config)
    model.generate = lambda input_ids, **_: input_ids
    rows = encode_pairs([(text, "") for text in texts], tokenizer, 64, 64)
    arguments = WritingTrainingArguments(tmp_path, per_device_eval_batch_size=2, use_cpu=True, disable_tqdm=True)
    trainer = WritingTrainer(model, arguments, tokenizer, lambda *_: {}, eval_dataset=rows)
    assert trainer.write(rows) == texts


def test_translation_leaves_what_it_promises(translated: tuple[Path, str]) -> None:
    folder, output = translated
    assert {"results.md", "learning_curve.png", "model"} <= {file.name for file in (folder / "run").iterdir()}
    results = json.loads((folder / "run" / "results.json").read_text())
    assert [system["system"] for system in results["systems"]] == [
        "source left as it is",
        "last step, greedy",
        "last step, 2 beams",
        "average of the last 5 checkpoints, 2 beams",
    ]
    assert results["systems"][0]["chrf"] > 0
    assert results["systems"][-1]["reload_difference"] <= 1e-6
    assert [entry["step"] for entry in results["history"] if "eval_bleu" in entry] == list(range(1, 7))
    assert "from the test split" in output.lower()


def test_translation_saves_the_average_of_the_last_checkpoints(translated: tuple[Path, str]) -> None:
    folder, _ = translated
    saved = load_file(folder / "run" / "model" / "model.safetensors")
    checkpoints = [load_file(folder / "run" / f"checkpoint-{step}" / "model.safetensors") for step in range(2, 7)]
    for name, tensor in saved.items():
        assert torch.equal(tensor, torch.stack([one[name] for one in checkpoints]).mean(0)), name
    assert any(not torch.equal(tensor, checkpoints[-1][name]) for name, tensor in saved.items())


def test_first_words_are_those_of_the_description(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from summarize_man_pages import first_words

    assert first_words("NOTES\nnone\n\nDESCRIPTION\nSort  lines\nof text.", 3) == "Sort lines of"
    assert first_words("No such section here", 2) == "No such"


BAD_INPUTS = {
    "missing file": ("translate_help.py", ["--train_file", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
    "missing language": ("translate_help.py", ["--train_file", "pairs.jsonl"], "It has: en, fr"),
    "missing column": (
        "summarize_man_pages.py",
        ["--train_file", "pairs.jsonl"],
        "by --text_column, --summary_column.",
    ),
    "unknown option": ("translate_help.py", ["--text_column", "x"], "Unknown option --text_column."),
    "misspelt option": ("summarize_man_pages.py", ["--sumary_column", "x"], "Did you mean '--summary_column'?"),
    "null text": (
        "summarize_man_pages.py",
        [*SUMMARIZE, "--test_file", "null.jsonl"],
        "null.jsonl, row 1: column name is null",
    ),
    "no package": ("translate_help.py", ["--packages_from", "nowhere"], "packages_from=nowhere"),
    "no network": ("summarize_man_pages.py", ["--dataset_name", "cnn_dailymail"], "Without a network"),
    "long pairs": (
        "translate_help.py",
        ["--train_file", "pairs.jsonl", "--target_lang", "fr", "--max_source_length", "2"],
        "raise the lengths",
    ),
    "wrong field": (
        "summarize_man_pages.py",
        [*SUMMARIZE, "--config_overrides", "hiden_size=8"],
        "hiden_size",
    ),
    "short beyond long": ("summarize_man_pages.py", ["--short_source_length", "9000"], "8192"),
}


def write_pages_and_pairs(folder: Path) -> None:
    write_rows(folder / "pairs.jsonl", sentences(20))
    write_rows(folder / "pages.jsonl", pages(20))
    write_rows(folder / "null.jsonl", [{"page": "a page", "name": None}])


def test_bad_inputs_are_refused_in_one_line(tmp_path: Path) -> None:
    check_refusals(tmp_path, BAD_INPUTS, write_pages_and_pairs)
    assert not list(tmp_path.rglob("checkpoint-*"))
