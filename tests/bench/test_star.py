"""`hf-efficient-attn bench star`: what it writes and compares. No timing is asserted."""

import json
from pathlib import Path

import pytest
import torch

from hf_efficient_attn.bench.encoders.cases import STAR, Shape, build_encoder, training_step
from hf_efficient_attn.bench.star.command import BENCHMARK
from hf_efficient_attn.cli import main

ENCODERS = BENCHMARK.encoders
TINY = ["--lengths", 16, 32, "--memory-lengths", 32, "--batch-size", 2, "--layers", 2, "--hidden-size", 16]
TINY += ["--heads", 2, "--repeats", 2, "--max-seconds", 0, "--device", "cpu"]


def test_results_tables_and_picture(tmp_path: Path, measured_in_forks: None) -> None:
    main(["bench", "star", *map(str, [*TINY, "--output", tmp_path])])
    rows = json.loads((tmp_path / "star.json").read_text())["results"]
    assert [(row["tokens"], row["encoder"]) for row in rows] == [(n, name) for n in (16, 32) for name in ENCODERS]
    for row in rows:
        for measure in ("forward", "training"):
            assert len(row[measure]["samples"]) == 2
            others = {"dense", "lstm"} if row["encoder"] == STAR else set()
            assert set(row[measure]["speed_against"]) == others
        assert (row["peak_memory_bytes"] is not None) == (row["tokens"] == 32)
    markdown = (tmp_path / "star.md").read_text()
    for title in ("How many times as fast Star-Transformer is, training step", "Milliseconds, forward", "Peak MiB"):
        assert f"## {title}" in markdown
    assert (tmp_path / "star.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_are_alike_and_train(name: str) -> None:
    shape = Shape(12, 2, 2, 16, 2, "float32", "cpu")
    encoder, states = build_encoder(name, shape), shape.states()
    out = encoder(states)
    assert out.shape == states.shape
    # the last token reads the first, however far away
    changed = states.clone()
    # not all of its numbers alike, which a layer norm would take back
    changed[:, 0, 0] += 1.0
    assert not torch.equal(encoder(changed)[:, -1], out[:, -1])
    seen = set()
    for key, parameter in encoder.named_parameters():
        parameter.register_hook(lambda _, key=key: seen.add(key))
    training_step(encoder, states)()
    unread = {key for key, _ in encoder.named_parameters()} - seen
    assert all("embed" in key for key in unread)
