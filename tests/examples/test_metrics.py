"""The metrics, loaded by path in a process without a network and with an empty cache of modules."""

import json
import math
import os
import sys
from pathlib import Path

import pytest
from distributed import run_script

FOLDER = Path(__file__).parents[2] / "examples" / "metrics"
INPUTS = {
    "classification_scores": [
        {"predictions": [0, 1, 1, 1], "references": [0, 0, 1, 1]},
        {"predictions": [0, 0, 0, 0], "references": [0, 0, 0, 1]},
    ],
    "bits_per_character": [{"predictions": [8 * math.log(2), 4 * math.log(2)], "references": ["äbc", "d"]}],
}
WRONG = {"bits_per_character": {"predictions": [1.0], "references": [""]}}
SCRIPT = """
import json, os, sys, evaluate
from pathlib import Path
# where other tests have imported it, it has read the environment
for name in ("HF_MODULES_CACHE", "HF_METRICS_CACHE"):
    setattr(evaluate.config, name, Path(os.environ[name]))
folder, inputs, wrong = json.loads(sys.argv[1])
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
    words = [sys.executable, "-c", SCRIPT, json.dumps([str(FOLDER), INPUTS, WRONG])]
    result = run_script(words, env={**os.environ, **environment, "HF_HUB_OFFLINE": "1"})
    assert result.returncode == 0, result.stderr
    return tuple(json.loads(result.stdout))


def test_every_metric_is_tested() -> None:
    assert sorted(file.stem for file in FOLDER.glob("*/*.py")) == sorted(INPUTS)
    assert all(file.parent.name == file.stem for file in FOLDER.glob("*/*.py"))
    assert all(
        f'evaluate.load("examples/metrics/{name}")' in (FOLDER / name / f"{name}.py").read_text() for name in INPUTS
    )


def test_classification_scores(computed: tuple[dict, dict, dict]) -> None:
    scores, constant = computed[0]["classification_scores"]
    assert scores["accuracy"] == 3 / 4
    assert scores["f1_macro"] == pytest.approx((2 / 3 + 4 / 5) / 2)
    assert scores["matthews"] == pytest.approx((2 * 1 - 1 * 0) / math.sqrt(3 * 2 * 2 * 1))
    assert constant == {"accuracy": 3 / 4, "f1_macro": pytest.approx(6 / 7 / 2), "matthews": 0}


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
