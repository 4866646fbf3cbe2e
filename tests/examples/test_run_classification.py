"""examples/run_classification.py, run as its users run it, on tiny files of their own."""

import json
from pathlib import Path
from random import Random

import pytest
from run_example import finish_example, start_forked, write_rows
from transformers import pipeline

import hf_efficient_attn  # noqa: F401  registers the family

SCRIPT = "run_classification.py"
SHORT = ["--max_seq_length", "32", "--disable_tqdm", "True"]
TOPIC = ["--train_file", "train.jsonl", "--text_column", "body", "--label_column", "topic", *SHORT]
EVERY_STEP = ["--eval_strategy", "steps", "--eval_steps", "1", "--save_strategy", "steps", "--save_steps", "1"]


def documents(num: int) -> list[dict]:
    """Rows of two classes by turns; every tenth would be of one class."""
    random = Random(0)
    words = {"ships": ["mast", "sail", "sea"], "weather": ["rain", "wind", "sea"]}
    topics = [("ships", "weather")[number % 2] for number in range(num)]
    return [{"body": " ".join(random.choices(words[topic], k=40)), "topic": topic} for topic in topics]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of two steps, each evaluated and saved."""
    folder = tmp_path_factory.mktemp("trained")
    write_rows(folder / "train.jsonl", documents(40))
    finish_example(start_forked(folder, SCRIPT, *TOPIC, *EVERY_STEP, "--max_steps", "2"))
    return folder


def state(folder: Path, step: int) -> dict:
    return json.loads((folder / "run" / f"checkpoint-{step}" / "trainer_state.json").read_text())


def test_a_pipeline_names_the_classes(trained: Path) -> None:
    classify = pipeline("text-classification", str(trained / "run"))
    assert classify("mast sail sea")[0]["label"] in ("ships", "weather")
    assert classify.model.config.id2label == {0: "ships", 1: "weather"}
    scores = json.loads((trained / "run" / "eval_results.json").read_text())
    assert 0 <= scores["eval_accuracy"] <= 1
    assert scores["accuracy_of_most_frequent"] == 0.5


def test_evaluation_by_steps(trained: Path) -> None:
    evaluated = [entry["step"] for entry in state(trained, 2)["log_history"] if "eval_accuracy" in entry]
    assert evaluated == [1, 2]


def test_numbers_are_classes_and_epochs_are_counted(tmp_path: Path) -> None:
    rows = [f"{row['body']},{(3, 7)[row['topic'] == 'ships']}" for row in documents(40)]
    (tmp_path / "train.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    epochs = ["--num_train_epochs", "2", "--eval_strategy", "epoch", "--per_device_train_batch_size", "18"]
    finish_example(start_forked(tmp_path, SCRIPT, "--train_file", "train.csv", *SHORT, *epochs))
    entries = state(tmp_path, 4)["log_history"]
    assert [entry["epoch"] for entry in entries if "eval_accuracy" in entry] == [1.0, 2.0]
    assert json.loads((tmp_path / "run" / "config.json").read_text())["id2label"] == {"0": "3", "1": "7"}
