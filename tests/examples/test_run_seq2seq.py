"""examples/run_seq2seq.py, run as its users run it, on a few documents and sentences."""

import json
import re
from pathlib import Path
from random import Random

import pytest
from run_example import finish_example, start_forked, write_rows
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

import hf_efficient_attn as hea

SCRIPT = "run_seq2seq.py"
WORDS = ("file", "line", "queue", "signal", "socket", "clock", "parser", "editor")
OWN = ["--train_file", "pages.jsonl", "--source_column", "page", "--target_column", "name"]
TINY = [*OWN, "--max_target_length", "8", "--generation_num_beams", "2", "--disable_tqdm", "True"]
EVERY_EPOCH = ["--eval_strategy", "epoch"]


def pages(num: int) -> list[dict]:
    """Return rows of which one is of more than 1,000 tokens."""
    random = Random(0)
    rows = [{"name": " ".join(random.sample(WORDS, 3))} for _ in range(num)]
    return [{**row, "page": f"{row['name']} " + "and so on " * (350 if i == 0 else 8)} for i, row in enumerate(rows)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which a run on whole documents has left `run`."""
    folder = tmp_path_factory.mktemp("summarization")
    write_rows(folder / "pages.jsonl", pages(40))
    output = finish_example(
        start_forked(folder, SCRIPT, *TINY, "--max_source_length", "8192", "--num_train_epochs", "1", *EVERY_EPOCH)
    )
    assert all(output.count(f"{name}: ") == 4 for name in ("source", "target", "generated"))
    (folder / "output.txt").write_text(output)
    return folder


def test_it_measures_what_the_model_and_the_first_words_reach(finished: Path) -> None:
    results = json.loads((finished / "run" / "all_results.json").read_text())
    assert results["epoch"] == 1
    assert results["train_runtime"] > 0
    assert 0 <= results["eval_rougeL"] < 1
    assert 0.3 < results["rougeL_of_first_words"] < 0.6  # three words of twelve


def test_the_saved_model_generates_the_printed_summaries(finished: Path) -> None:
    model, tokenizer = (kind.from_pretrained(finished / "run") for kind in (AutoModelForSeq2SeqLM, AutoTokenizer))
    assert isinstance(model, hea.SparseSeq2SeqForConditionalGeneration)
    assert model.config.attention_pattern["encoder"]["left"] == 2
    printed = (finished / "output.txt").read_text()
    for source in re.findall(r"source: (.+)", printed):
        written = model.generate(**tokenizer(source, return_tensors="pt"))
        assert f"generated: {tokenizer.decode(written[0], skip_special_tokens=True)}\n" in printed


def test_it_resumes_and_takes_a_checkpoint(finished: Path) -> None:
    more = [*EVERY_EPOCH, "--max_source_length", "8192", "--num_train_epochs"]
    finish_example(start_forked(finished, SCRIPT, *TINY, *more, "2", "--resume"))
    state = json.loads((finished / "run" / "checkpoint-6" / "trainer_state.json").read_text())
    assert [entry["step"] for entry in state["log_history"] if "eval_rougeL" in entry] == [3, 6]
    further = ["--model_name_or_path", "run", "--output_dir", "further", "--do_train", "False"]
    finish_example(start_forked(finished, SCRIPT, *TINY, *more, "1", *further))
    after, before = (json.loads((finished / name / "eval_results.json").read_text()) for name in ("further", "run"))
    assert after["eval_loss"] == pytest.approx(before["eval_loss"], rel=1e-4)


def test_translation_trains_the_transformer_of_2017(tmp_path: Path) -> None:
    rows = [{"translation": {"en": f"Open the file {i}.", "fr": f"Ouvrez le fichier {i}."}} for i in range(40)]
    write_rows(tmp_path / "pairs.jsonl", rows)
    columns = ["--source_column", "translation.en", "--target_column", "translation.fr", "--max_target_length", "12"]
    schedule = ["--lr_scheduler_type", "inverse_sqrt", "--warmup_steps", "2", "--max_steps", "3"]
    data = ["--train_file", "pairs.jsonl", *columns]
    finish_example(start_forked(tmp_path, SCRIPT, "--task", "translation", *data, *schedule))
    results = json.loads((tmp_path / "run" / "all_results.json").read_text())
    assert 0 <= results["eval_bleu"] <= results["bleu_of_sources"]
    assert results["chrf_of_sources"] > 10
    config = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "run").config
    assert (config.norm_position, config.position_embedding_type) == ("post", "sinusoidal")
