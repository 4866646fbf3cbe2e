"""The metrics, loaded by path in a process without a network and with an empty cache of modules."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "metrics"
# answers of articles and signs alone; the last two pairs agree
WORDLESS = (("The", "a"), ("?!", "the"), ("the", "fox"), ("", "An"), ("the", "the "), ("", ""))
INPUTS = {
    "sacrebleu_score": [
        {"predictions": ["the cat sat on the mat"], "references": [["the cat sat on the mat"]]},
        {"predictions": ["the cat sat on the mat"], "references": ["a dog ran off"]},
        {"predictions": ["the the the cat", "a b c d"], "references": [["the cat is here"], ["a b c d"]]},
    ],
    "rouge_scores": [
        {"predictions": ["sort an array", "x"], "references": ["sort or search an array", "x"]},
        {"predictions": ["sorting"], "references": ["sort"]},
        {"predictions": ["sorting"], "references": ["sort"], "use_stemmer": False},
    ],
    "classification_scores": [
        {"predictions": [0, 1, 1, 1], "references": [0, 0, 1, 1]},
        {"predictions": [0, 0, 0, 0], "references": [0, 0, 0, 1]},
    ],
    "squad_scores": [
        {"predictions": ["the Fox!"], "references": [["fox", "a red fox"]]},
        {"predictions": ["a red fox", ""], "references": [["the quick red fox"], ["fox"]]},
        {"predictions": ["fox fox"], "references": [["fox cub"]]},
        *({"predictions": [said], "references": [[true]]} for said, true in WORDLESS),
    ],
    "bits_per_character": [{"predictions": [8 * math.log(2), 4 * math.log(2)], "references": ["äbc", "d"]}],
}
WRONG = {
    "sacrebleu_score": {"predictions": ["a", "b"], "references": [["a"], ["a", "b"]]},
    "squad_scores": {"predictions": ["a"], "references": [[]]},
    "bits_per_character": {"predictions": [1.0], "references": [""]},
}
SCRIPT = """
import json, sys, evaluate
folder, inputs, wrong = json.loads(sys.stdin.read())
nothing = {"predictions": [], "references": []}
def compute(name, one):
    return evaluate.load(f"{folder}/{name}").compute(**one)
scores = {name: [compute(name, one) for one in several] for name, several in inputs.items()}
def error_of(name, one):
    try:
        compute(name, one)
    except ValueError as error:
        return str(error)
errors = {name: error_of(name, one) for name, one in wrong.items()}
json.dump([scores, errors, {name: error_of(name, nothing) for name in inputs}], sys.stdout)
"""


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, dict, dict]:
    """The scores of INPUTS by metric, the errors of WRONG, and those of empty lists."""
    caches = {"HF_HOME": "home", "HF_MODULES_CACHE": "modules", "HF_METRICS_CACHE": "metrics"}
    folder = tmp_path_factory.mktemp("caches")
    environment = {name: str(folder / cache) for name, cache in caches.items()}
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input=json.dumps([str(FOLDER), INPUTS, WRONG]),
        env={**os.environ, **environment, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return tuple(json.loads(result.stdout))


def test_every_metric_is_tested() -> None:
    assert sorted(file.stem for file in FOLDER.glob("*/*.py")) == sorted(INPUTS)
    assert all(file.parent.name == file.stem for file in FOLDER.glob("*/*.py"))
    assert all(
        f'evaluate.load("examples/metrics/{name}")' in (FOLDER / name / f"{name}.py").read_text() for name in INPUTS
    )


def test_sacrebleu_score(computed: tuple[dict, dict, dict]) -> None:
    same, other, clipped = computed[0]["sacrebleu_score"]
    assert same["bleu"] == pytest.approx(100)
    assert same["chrf"] == pytest.approx(100)
    assert other["bleu"] < 5
    assert other["chrf"] < 20
    # clipped matches of 1- to 4-grams: 6 of 8, 4 of 6, 2 of 4, 1 of 2; no brevity penalty
    assert clipped["bleu"] == pytest.approx(100 * (6 / 8 * 4 / 6 * 2 / 4 * 1 / 2) ** 0.25)
    assert clipped["num_sentences"] == 2
    assert "tok:13a" in clipped["bleu_signature"]
    assert "nc:6" in clipped["chrf_signature"]


def test_rouge_scores(computed: tuple[dict, dict, dict]) -> None:
    scores, stemmed, unstemmed = computed[0]["rouge_scores"]
    # 3 of 3 and 3 of 5 words, 1 of 2 and 1 of 4 pairs; the second summary is right, but holds no pair
    assert scores["rouge1"] == scores["rougeL"] == pytest.approx((2 * 3 / (3 + 5) + 1) / 2)
    assert scores["rouge2"] == pytest.approx(2 * 1 / (2 + 4) / 2)
    assert stemmed["rouge1"] == 1
    assert unstemmed["rouge1"] == 0


def test_classification_scores(computed: tuple[dict, dict, dict]) -> None:
    scores, constant = computed[0]["classification_scores"]
    assert scores["accuracy"] == 3 / 4
    assert scores["f1_macro"] == pytest.approx((2 / 3 + 4 / 5) / 2)
    assert scores["matthews"] == pytest.approx((2 * 1 - 1 * 0) / math.sqrt(3 * 2 * 2 * 1))
    assert constant == {"accuracy": 3 / 4, "f1_macro": pytest.approx(6 / 7 / 2), "matthews": 0}


def test_squad_scores(computed: tuple[dict, dict, dict]) -> None:
    normalized, partial, repeated, *wordless = computed[0]["squad_scores"]
    assert normalized == {"exact_match": 100, "f1": 100}
    # "red fox" in "quick red fox": precision 1, recall 2/3; then an empty answer
    assert partial == {"exact_match": 0, "f1": pytest.approx(100 * (2 * 1 * (2 / 3) / (1 + 2 / 3)) / 2)}
    assert repeated["f1"] == pytest.approx(50)
    assert (
        [scores["exact_match"] for scores in wordless] == [scores["f1"] for scores in wordless] == [0] * 4 + [100] * 2
    )


def test_bits_per_character(computed: tuple[dict, dict, dict]) -> None:
    (scores,) = computed[0]["bits_per_character"]
    assert scores["bits_per_character"] == pytest.approx(12 / 4)
    assert scores["bits_per_byte"] == pytest.approx(12 / 5)
    assert scores["num_characters"] == 4


def test_wrong_inputs_are_refused(computed: tuple[dict, dict, dict]) -> None:
    errors = computed[1]
    assert errors.keys() == WRONG.keys()
    assert all("Allowed: " in error for error in errors.values())


def test_empty_lists_are_refused_by_every_metric(computed: tuple[dict, dict, dict]) -> None:
    errors = computed[2]
    assert errors.keys() == INPUTS.keys()
    for name, error in errors.items():
        assert error is not None, name
        assert error.startswith("predictions: an empty list. Allowed: at least one "), name
