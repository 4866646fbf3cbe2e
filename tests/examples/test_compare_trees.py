"""examples/experiments/compare_trees.py, on documents in place of mails; and what tokens read by the size of nodes."""

import json
import sys
from pathlib import Path
from random import Random

import pytest
import torch
from datasets import ClassLabel, Dataset, DatasetDict
from models.bp_transformer.tiny_models import build
from models_cases import random_ids

WORDS = [f"word{number}" for number in range(40)]
TINY = ["--hidden_size", "16", "--num_hidden_layers", "1", "--num_attention_heads", "2", "--vocab_size", "200"]
TINY += ["--num_nodes", "1", "2", "--max_lengths", "16", "40", "--max_steps", "2", "--tokens_per_step", "256"]
TINY += ["--steps_per_model", "1", "--seeds", "0", "1"]


def documents(num: int, seed: int) -> Dataset:
    """Documents of two classes, which a word tells."""
    random = Random(seed)
    rows = [
        {"text": " ".join(random.choices([*WORDS, f"topic{number % 2}"], k=60)), "label": number % 2}
        for number in range(num)
    ]
    return Dataset.from_list(rows).cast_column("label", ClassLabel(names=["weather", "ships"]))


@pytest.mark.thorough
def test_trees_a_band_and_dense_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a second run with --resume trains only what is missing."""
    import compare_trees as experiment
    from comparison.run_folder import run_experiment

    folder = tmp_path / "run"
    monkeypatch.setattr(experiment, "mails", lambda: DatasetDict(train=documents(30, 0), validation=documents(8, 1)))
    monkeypatch.setattr(sys, "argv", ["compare_trees.py", *TINY, "--output_dir", str(folder)])
    run_experiment(experiment.main, experiment.Arguments)
    found = json.loads((folder / "results.json").read_text())
    names = ["tree, k = 1", "tree, k = 2", "band", "dense"]
    for length in ("16", "40"):
        assert list(found["models"][length]) == names
        for name, result in found["models"][length].items():
            assert result["num_steps"] == 2
            assert result["reload_difference"] <= 1e-6
            assert (result["pairs_per_token"] == int(length)) == (name == "dense")
            shares = found["seeds"][length][name][0].get("sizes", [])
            assert len(shares) == name.startswith("tree")
            assert all(sum(layer.values()) == pytest.approx(1.0) for layer in shares)
        assert {result["num_steps"] for result in found["models_at_equal_steps"][length].values()} == {1}
        assert [len(results) for results in found["seeds_at_equal_steps"][length].values()] == [2] * len(names)
    assert (folder / "trees.png").stat().st_size > 10_000
    (folder / "band_40" / "seed_0.json").unlink()
    (folder / "band_40" / "seed_1_steps.json").unlink()
    kept = (folder / "dense_40" / "seed_0.json").stat().st_mtime_ns
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--resume"])
    run_experiment(experiment.main, experiment.Arguments)
    assert (folder / "band_40" / "seed_0.json").exists()
    assert (folder / "band_40" / "seed_1_steps.json").exists()
    assert (folder / "dense_40" / "seed_0.json").stat().st_mtime_ns == kept


def test_shares_are_those_of_the_nodes_that_a_token_reads() -> None:
    """With queries of zeros and without relations every node that a token reads weighs the same."""
    from comparison.tree_reading import share_by_size

    model = build("AutoModelForSequenceClassification", num_nodes=1, position_embedding_type="none")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.zero_()
    (shares, _) = share_by_size(model, random_ids(1, 2))
    # two tokens, each of which reads itself and the other
    assert shares == pytest.approx({"itself": 0.5, "1": 0.5, "2": 0.0})
