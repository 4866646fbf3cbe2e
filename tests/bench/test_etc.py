"""`hf-efficient-attn bench etc`: what it writes and compares. No timing is asserted."""

import json
from pathlib import Path

from hf_efficient_attn.bench.encoders.cases import DENSE, ETC, Shape, build_encoder, training_step
from hf_efficient_attn.cli import main

TINY = ["--quick", "--lengths", 16, 32, "--memory-lengths", 32, "--layers", 2, "--hidden-size", 16, "--heads", 2]
TINY += ["--local-radius", 3, "--chunk-tokens", 8, "--max-seconds", 0, "--device", "cpu"]


def test_results_tables_and_picture(tmp_path: Path, measured_in_forks: None) -> None:
    main(["bench", "etc", *map(str, [*TINY, "--output", tmp_path])])
    rows = json.loads((tmp_path / "etc.json").read_text())["results"]
    assert [(row["tokens"], row["encoder"]) for row in rows] == [(n, name) for n in (16, 32) for name in (ETC, DENSE)]
    for row in rows:
        assert set(row["training"]["speed_against"]) == ({DENSE} if row["encoder"] == ETC else set())
        assert (row["peak_memory_bytes"] is not None) == (row["tokens"] == 32)
    markdown = (tmp_path / "etc.md").read_text()
    for title in ("How many times as fast ETC is, training step", "Milliseconds, forward", "Peak MiB"):
        assert f"## {title}" in markdown
    assert "reads 3 on each side and all global tokens, one for 8 long ones" in markdown
    assert (tmp_path / "etc.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_an_etc_reads_as_far_as_is_asked_for_and_trains() -> None:
    shape = Shape(24, 2, 1, 16, 2, "float32", "cpu", local_radius=3, chunk_tokens=8)
    encoder, states = build_encoder(ETC, shape), shape.states()
    assert encoder.model.config.local_radius == 3
    assert encoder.model(inputs_embeds=states).global_hidden_state.shape == (2, 3, 16)
    out, changed = encoder(states), states.clone()
    # in one layer a token reads the long tokens around it, and global tokens, which do not yet know the text
    changed[:, 12, 0] += 1.0
    same = (encoder(changed) == out).all(-1).all(0)
    assert same.logical_not().nonzero().flatten().tolist() == list(range(9, 16))
    seen = set()
    for key, parameter in encoder.named_parameters():
        parameter.register_hook(lambda _, key=key: seen.add(key))
    training_step(encoder, states)()
    assert any("mlp" in key for key in seen)
