"""examples/experiments/listops.py: the data of the Long Range Arena, and every mechanism on them."""

import json
import sys
from itertools import accumulate, islice
from pathlib import Path
from statistics import median

import pytest

TINY = ["--hidden_size", "16", "--num_hidden_layers", "2", "--num_attention_heads", "2", "--keys", "8"]
TINY += ["--min_tokens", "4", "--max_tokens", "24", "--train_rows", "40", "--test_rows", "20", "--max_steps", "2"]
TINY += ["--tokens_per_step", "200"]


def value_of(tokens: list[str]) -> int:
    """Evaluate an expression from its text, with a stack."""
    rules = {"[MIN": min, "[MAX": max, "[MED": lambda each: int(median(each)), "[SM": lambda each: sum(each) % 10}
    stack: list[list] = [[]]
    for token in tokens:
        if token in rules:
            stack.append([rules[token]])
        elif token == "]":
            rule, *values = stack.pop()
            stack[-1].append(rule(values))
        else:
            stack[-1].append(int(token))
    return stack[0][0]


def test_values_and_lengths_are_those_of_the_rules() -> None:
    from comparison.list_operations import expressions, written

    drawn = list(islice(expressions(0, 20, 60, max_depth=4, max_args=5), 100))
    assert drawn == list(islice(expressions(0, 20, 60, max_depth=4, max_args=5), 100))
    assert {value for _, value in drawn} == set(range(10))
    for tokens, value in drawn:
        text = written(tokens).split()
        assert 20 < len(text) < 60
        assert value_of(text) == value
        steps = [(token[0] == "[") - (token == "]") for token in text]
        assert 1 <= max(accumulate(steps)) <= 3


def test_published_lengths_are_drawn_quickly() -> None:
    from comparison.list_operations import expressions

    assert all(500 < len(tokens) < 2000 for tokens, _ in islice(expressions(1), 20))


@pytest.mark.thorough
def test_mechanisms_are_trained_and_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a second run with --resume trains only what is missing."""
    import listops as experiment
    from comparison.run_folder import run_experiment

    folder, names = tmp_path / "run", experiment.ENCODERS
    monkeypatch.setattr(sys, "argv", ["listops.py", *TINY, "--output_dir", str(folder)])
    run_experiment(experiment.main, experiment.Arguments)
    found = json.loads((folder / "results.json").read_text())
    assert list(found["mechanisms"]) == names
    assert {"dense", "star", "tree", "etc", "sas_p", "talking_heads", "residual_scores", "seq2seq"} <= set(names)
    for name in names:
        (result,) = found["seeds"][name]
        assert (result["num_steps"], result["stopped"]) == (2, None)
        assert 0 <= result["accuracy"] <= 1
    # the last column is what was published
    cells = [line.strip("| ").split("|") for line in (folder / "results.md").read_text().splitlines() if "|" in line]
    told = {line[0].strip(): line[-1].strip() for line in cells}
    assert {name for name in names if told[name] != "–"} == set(found["published"])
    assert (folder / "listops.png").stat().st_size > 10_000
    (folder / "linear" / "seed_0.json").unlink()
    kept = (folder / "dense" / "seed_0.json").stat().st_mtime_ns
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--resume"])
    run_experiment(experiment.main, experiment.Arguments)
    assert (folder / "linear" / "seed_0.json").exists()
    assert (folder / "dense" / "seed_0.json").stat().st_mtime_ns == kept


def test_numbers_that_no_expression_can_have_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import listops as experiment
    from comparison.run_folder import run_experiment

    monkeypatch.setattr(sys, "argv", ["listops.py", "--min_tokens", "9", "--max_tokens", "10"])
    with pytest.raises(SystemExit, match="max_tokens"):
        run_experiment(experiment.main, experiment.Arguments)
