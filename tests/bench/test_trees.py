"""`hf-efficient-attn bench trees`: what it writes and compares. No timing is asserted."""

import json
from pathlib import Path

import torch

from hf_efficient_attn.bench.encoders.cases import DENSE, TREE, Shape, build_encoder, training_step
from hf_efficient_attn.cli import main

TINY = ["--quick", "--lengths", 16, 32, "--memory-lengths", 32, "--layers", 2, "--hidden-size", 16, "--heads", 2]
TINY += ["--max-seconds", 0, "--device", "cpu"]


def test_results_tables_and_picture(tmp_path: Path, measured_in_forks: None) -> None:
    main(["bench", "trees", *map(str, [*TINY, "--output", tmp_path])])
    results = json.loads((tmp_path / "trees.json").read_text())
    assert results["settings"]["repeats"] == 2
    rows = results["results"]
    assert [(row["tokens"], row["encoder"]) for row in rows] == [(n, name) for n in (16, 32) for name in (TREE, DENSE)]
    for row in rows:
        assert set(row["training"]["speed_against"]) == ({DENSE} if row["encoder"] == TREE else set())
        assert (row["peak_memory_bytes"] is not None) == (row["tokens"] == 32)
    markdown = (tmp_path / "trees.md").read_text()
    for title in ("How many times as fast BP-Transformer is, training step", "Milliseconds, forward", "Peak MiB"):
        assert f"## {title}" in markdown
    assert markdown.startswith("# BP-Transformer: 2 layers")
    assert (tmp_path / "trees.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_a_tree_trains_at_the_density_that_is_asked_for() -> None:
    shape = Shape(12, 2, 2, 16, 2, "float32", "cpu", num_nodes=3)
    encoder, states = build_encoder(TREE, shape), shape.states()
    assert encoder.model.config.num_nodes == 3
    seen = set()
    for key, parameter in encoder.named_parameters():
        parameter.register_hook(lambda _, key=key: seen.add(key))
    training_step(encoder, states)()
    assert {key for key, _ in encoder.named_parameters()} - seen == {"model.embed_tokens.weight"}
    with torch.no_grad():
        assert encoder(states).shape == states.shape
