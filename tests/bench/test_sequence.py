"""`hf-efficient-attn bench sequence`: what it writes, that bytes are those of the formula, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

from hf_efficient_attn.bench.sequence.command import check_bytes
from hf_efficient_attn.cli import main
from hf_efficient_attn.errors import EfficientAttentionError

TINY = ["--tokens", "256", "--heads", "2", "--key-heads", "1", "--head-dim", "8", "--repeats", "2"]


def bench(*options: Any) -> None:
    """Run the command at a tiny size; later options win."""
    main(["bench", "sequence", *TINY, *map(str, options)])


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that a run with two processes wrote."""
    folder = tmp_path_factory.mktemp("bench")
    bench("--pattern", "band(16, 0) | global(0)", "--processes", 2, "--gigabits", 0, 10, "--output", folder)
    return folder


def test_results(output: Path) -> None:
    results = json.loads((output / "sequence.json").read_text())
    rows = results["results"]
    ways = ["halo", "halo, waiting", "all-gather", "heads"]
    assert [(row["gigabits"], row["way"]) for row in rows] == [(speed, way) for speed in (0, 10) for way in ways]
    # keys and values of 16 tokens at the edge and of the first one, and its query in two heads, against 128 tokens
    assert {row["forward_bytes"] for row in rows if row["way"].startswith("halo")} == {(17 + 1) * 2 * 8 * 4}
    assert {row["backward_bytes"] for row in rows if row["way"] == "all-gather"} == {128 * 2 * 8 * 4}
    for row in rows:
        for measure in ("forward_seconds", "seconds"):
            assert len(row[measure]["samples"]) == 2
            assert 0 < row[measure]["first_quartile"] <= row[measure]["median"]
    assert output.joinpath("sequence.md").read_text().count("\n| 2 processes") == 4 + 8
    assert output.joinpath("sequence.png").read_bytes().startswith(b"\x89PNG")


def test_other_bytes_are_an_error(output: Path) -> None:
    results = json.loads((output / "sequence.json").read_text())
    check_bytes(2, results["settings"], results["results"])
    results["results"][0]["forward_bytes"] += 1
    with pytest.raises(EfficientAttentionError, match="halo among 2 processes sent"):
        check_bytes(2, results["settings"], results["results"])


@pytest.mark.neighbours
def test_eight_processes_send_112_times_less_than_all_keys(tmp_path: Path) -> None:
    """At 131,072 tokens with a window of 1,024, counted as it is sent; the ratio does not depend on the heads."""
    sizes = ("--tokens", 131072, "--heads", 1, "--key-heads", 1, "--head-dim", 1, "--repeats", 1)
    bench(*sizes, "--processes", 8, "--gigabits", 0, "--output", tmp_path)
    sent = {row["way"]: row for row in json.loads((tmp_path / "sequence.json").read_text())["results"]}
    assert sent["halo"]["processes"] == 8
    # keys and values of 1,024 tokens in float32, to one neighbour
    assert sent["halo"]["forward_bytes"] == sent["halo"]["backward_bytes"] == 1024 * 2 * 4
    for name in ("forward_bytes", "backward_bytes"):
        assert sent["all-gather"][name] == 112 * sent["halo"][name]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--processes", 1], "processes=1 share no text"),
        (["--gigabits", -1], "gigabits=-1.0 must be at least 0"),
        (["--repeats", 0], "repeats=0 must be at least 1"),
        (["--pattern", "bond(1)"], "bond"),
    ],
)
def test_refusals(options: list[Any], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench(*options)
    assert message in capsys.readouterr().err
