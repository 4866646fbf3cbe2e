"""examples/run_token_classification.py, run as its users run it, and the kinds of names that it learns by default."""

import json
from pathlib import Path
from random import Random

import pytest
from run_example import EXAMPLES, finish_example, start_forked, write_rows
from transformers import pipeline

import hf_efficient_attn  # noqa: F401  registers the family

SCRIPT = "run_token_classification.py"
SHORT = ["--train_file", "train.jsonl", "--max_seq_length", "32", "--max_steps", "2", "--disable_tqdm", "True"]


def sentences(num: int) -> list[dict]:
    """Rows of 40 words, longer than a piece; towns are labelled, numbers are not to be learned."""
    random = Random(0)
    towns = {"Oslo": "B-TOWN", "Rome": "B-TOWN", "7": None}
    rows = [random.choices(["we", "go", "to", "see", *towns], k=40) for _ in range(num)]
    return [{"tokens": words, "ner_tags": [towns.get(word, "O") for word in words]} for words in rows]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    write_rows(folder / "train.jsonl", sentences(20))
    finish_example(start_forked(folder, SCRIPT, *SHORT, "--save_strategy", "steps", "--save_steps", "1"))
    return folder


def test_a_pipeline_labels_words(trained: Path) -> None:
    label = pipeline("token-classification", str(trained / "run"))
    (predicted,) = label(["we", "see", "Oslo"], is_split_into_words=True)
    assert {entity["entity"] for entity in predicted} <= {"B-TOWN", "O"}
    assert label.model.config.id2label == {0: "B-TOWN", 1: "O"}


def test_all_labelled_words_are_scored(trained: Path) -> None:
    scores = json.loads((trained / "run" / "eval_results.json").read_text())
    assert 0 <= scores["eval_accuracy"] <= 1
    # each word has the same label everywhere
    assert scores["accuracy_of_most_frequent"] == 1
    # 2 rows are held out, each read in several pieces, none of them longer than 32 tokens
    assert scores["eval_samples_per_second"] * scores["eval_runtime"] > 2


def test_resume_goes_on(trained: Path) -> None:
    finish_example(start_forked(trained, SCRIPT, *SHORT, "--max_steps", "3", "--resume"))
    state = json.loads((trained / "run" / "checkpoint-3" / "trainer_state.json").read_text())
    assert state["global_step"] == 3
    finish_example(start_forked(trained, SCRIPT, *SHORT, "--model_name_or_path", "run", "--output_dir", "again"))
    assert (trained / "again" / "model.safetensors").exists()


def test_numbers_are_classes(tmp_path: Path) -> None:
    numbers = {"B-TOWN": 4, "O": 9}
    rows = [{**row, "ner_tags": [numbers.get(tag) for tag in row["ner_tags"]]} for row in sentences(20)]
    write_rows(tmp_path / "train.jsonl", rows)
    finish_example(start_forked(tmp_path, SCRIPT, *SHORT))
    assert json.loads((tmp_path / "run" / "config.json").read_text())["id2label"] == {"0": "4", "1": "9"}


PROGRAM = """
import os.path as paths
from enum import Flag, auto as fresh
LIMIT = 3
class Shape(Flag):
    CIRCLE = fresh()
    def area(self, radius=LIMIT):
        global total
        total = [radius for radius in range(LIMIT) if Shape.CIRCLE]
        CIRCLE = paths.join(end="x")
        return lambda x: x + CIRCLE + unknown
"""


def test_names_have_the_kind_of_their_binding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from example_data.python_names import labelled

    found = list(labelled(PROGRAM))
    assert [word for word, _ in found[:5]] == ["\n", "import", "os", ".", "path"]
    assert ("\n        ", None) in found
    assert ('""', None) in found
    kinds = [(word, kind) for word, kind in found if kind]
    local, glob = "local variable", "global variable"
    assert kinds == [
        *[("os", "module"), ("path", "module"), ("paths", "module")],
        *[("enum", "module"), ("Flag", "imported name"), ("auto", "imported name"), ("fresh", "imported name")],
        *[("LIMIT", glob), ("Shape", "class"), ("Flag", "imported name")],
        *[("CIRCLE", "attribute"), ("fresh", "imported name"), ("area", "function")],
        *[("self", "parameter"), ("radius", "parameter"), ("LIMIT", glob)],
        *[("radius", local), ("radius", local), ("range", "builtin"), ("LIMIT", glob)],
        *[("Shape", "class"), ("CIRCLE", "attribute")],
        *[("CIRCLE", local), ("paths", "module"), ("join", "attribute"), ("end", "keyword argument")],
        *[("x", "parameter"), ("x", "parameter"), ("CIRCLE", local)],
    ]


def test_parameters_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from example_data.python_names import labelled

    source = Path(json.__file__).read_text()
    kinds = {kind for word, kind in labelled(source) if word == "object_hook"}
    assert kinds == {"parameter", "keyword argument"}
