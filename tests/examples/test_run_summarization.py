"""examples/run_summarization.py, run as its users run it, on a few documents."""

import json
from pathlib import Path
from random import Random

import pytest
from run_example import finish_example, start_forked, write_rows
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

import hf_efficient_attn as hea

SCRIPT = "run_summarization.py"
WORDS = ("file", "line", "queue", "signal", "socket", "clock", "parser", "editor")
OWN = ["--train_file", "pages.jsonl", "--text_column", "page", "--summary_column", "name"]
TINY = [*OWN, "--max_target_length", "8", "--generation_num_beams", "2", "--disable_tqdm", "True"]
EVERY_EPOCH = ["--eval_strategy", "epoch"]


def pages(num: int) -> list[dict]:
    """Return rows of which one is of more than 1,000 tokens."""
    random = Random(0)
    rows = [{"name": " ".join(random.sample(WORDS, 3))} for _ in range(num)]
    return [{**row, "page": f"{row['name']} " + "and so on " * (350 if i == 0 else 8)} for i, row in enumerate(rows)]


def samples(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which a run on whole documents has left `run`."""
    folder = tmp_path_factory.mktemp("summarization")
    write_rows(folder / "pages.jsonl", pages(40))
    output = finish_example(
        start_forked(folder, SCRIPT, *TINY, "--max_source_length", "8192", "--num_train_epochs", "1", *EVERY_EPOCH)
    )
    assert all(output.count(f"\n{name}: ") == 4 for name in ("name", "untrained", "trained"))
    return folder


def test_it_measures_what_the_model_and_the_first_words_reach(finished: Path) -> None:
    results = json.loads((finished / "run" / "all_results.json").read_text())
    assert results["epoch"] == 1
    assert results["train_runtime"] > 0
    assert 0 <= results["eval_rougeL"] < 1
    assert 0.3 < results["rougeL_of_first_words"] < 0.6  # three words of twelve


def test_the_model_that_is_left_writes_the_shown_summaries(finished: Path) -> None:
    model, tokenizer = (kind.from_pretrained(finished / "run") for kind in (AutoModelForSeq2SeqLM, AutoTokenizer))
    assert isinstance(model, hea.SparseSeq2SeqForConditionalGeneration)
    assert model.config.attention_pattern["encoder"]["left"] == 2
    for row in samples(finished / "run"):
        written = model.generate(**tokenizer(row["page"], return_tensors="pt"))
        assert tokenizer.decode(written[0], skip_special_tokens=True) == row["trained"]


def test_it_resumes_and_takes_a_checkpoint(finished: Path) -> None:
    more = [*EVERY_EPOCH, "--max_source_length", "8192", "--num_train_epochs"]
    resumed = start_forked(finished, SCRIPT, *TINY, *more, "2", "--resume")
    finish_example(resumed)
    state = json.loads((finished / "run" / "checkpoint-6" / "trainer_state.json").read_text())
    assert [entry["step"] for entry in state["log_history"] if "eval_rougeL" in entry] == [3, 6]
    further = ["--model_name_or_path", "run", "--output_dir", "further", "--eval_strategy", "no"]
    finish_example(start_forked(finished, SCRIPT, *TINY, *more, "1", *further))
    after, before = (
        [row[name] for row in samples(finished / folder)]
        for folder, name in (("run", "trained"), ("further", "untrained"))
    )
    assert after == before
