"""`hf-efficient-attn bench images`: what it writes and compares. No timing is asserted."""

import json
from pathlib import Path

import pytest
import torch

from hf_efficient_attn.bench.encoders.cases import DINOV2, NEIGHBOURHOOD, Shape, build_encoder
from hf_efficient_attn.cli import main

TINY = ["--batch-size", 2, "--layers", 2, "--hidden-size", 16, "--heads", 2, "--patch-pixels", 2, "--grid-radius", 1]
TINY += ["--repeats", 2, "--max-seconds", 0, "--device", "cpu"]


def test_results_tables_and_picture(tmp_path: Path, measured_in_forks: None) -> None:
    sizes = ["--lengths", 9, 16, "--memory-lengths", 16]
    main(["bench", "images", *map(str, [*TINY, *sizes, "--output", tmp_path])])
    rows = json.loads((tmp_path / "images.json").read_text())["results"]
    assert [(row["tokens"], row["encoder"]) for row in rows] == [
        (n, name) for n in (9, 16) for name in (NEIGHBOURHOOD, DINOV2)
    ]
    for row in rows:
        for measure in ("forward", "training"):
            assert set(row[measure]["speed_against"]) == ({DINOV2} if row["encoder"] == NEIGHBOURHOOD else set())
        assert (row["peak_memory_bytes"] is not None) == (row["tokens"] == 16)
    markdown = (tmp_path / "images.md").read_text()
    assert "## How many times as fast a DINOv2 of neighbourhoods is, forward" in markdown
    assert "a patch of 2 × 2 pixels reads 1 patches on each side along both axes" in markdown
    assert (tmp_path / "images.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_both_have_equal_weights_and_read_what_their_names_say() -> None:
    shape = Shape(25, 1, 1, 16, 2, "float32", "cpu", patch_pixels=2, grid_radius=1)
    near, dense = (build_encoder(name, shape).eval() for name in (NEIGHBOURHOOD, DINOV2))
    assert all(map(torch.equal, near.state_dict().values(), dense.state_dict().values()))
    pixels = shape.states()
    assert pixels.shape == (1, 3, 10, 10)
    changed = pixels.clone()
    # the patch in the middle, of rows of five behind the class token
    changed[..., 4:6, 4:6] += 1.0
    for encoder, readers in ((near, {0, 7, 8, 9, 12, 13, 14, 17, 18, 19}), (dense, set(range(26)))):
        moved = (encoder(changed) - encoder(pixels)).abs().amax(-1)[0]
        assert set(moved.nonzero().flatten().tolist()) == readers


def test_patches_of_no_square_image_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refusal:
        main(["bench", "images", *map(str, [*TINY, "--lengths", 9, 20, "--output", tmp_path])])
    assert refusal.value.code == 2
    assert "lengths=20: a square image has as many patches as a square number, such as 16 or 25." in (
        capsys.readouterr().err
    )
