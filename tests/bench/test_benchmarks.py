"""The benchmarks in model_cards: each script runs at a tiny size and writes what the contest writes. No timing."""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import blocks
import content
import etc
import mechanisms
import pytest
import spans
import star
import trees
from contest import Contest

SCRIPTS = Path(star.__file__).parent
SMALL = ["--lengths", 16, 32, "--memory-lengths", "--hidden-size", 16, "--heads", 2]
TIMED = ["--max-seconds", 0, "--repeats", 2, "--device", "cpu"]
LAYERS = ["--layers", 1, "--batch-size", 1]
CASES = {
    "star": (star.CONTEST, [*SMALL, *LAYERS]),
    "etc": (etc.CONTEST, [*SMALL, *LAYERS, "--local-radius", 3, "--chunk-tokens", 8]),
    "trees": (trees.CONTEST, [*SMALL, *LAYERS]),
    "content": (
        content.CONTEST,
        [
            *(
                "--lengths",
                64,
                "--memory-lengths",
                "--depths",
                "--heads",
                2,
                "--head-dim",
                8,
                "--hash-chunk-tokens",
                16,
            ),
            *("--cluster-tokens", 16, "--block-tokens", 16, "--chosen-tokens", 8),
        ],
    ),
    "mechanisms": (mechanisms.CONTEST, [*SMALL, "--keys", 8]),
    "mechanisms_causal": (mechanisms.CONTEST, [*SMALL, "--keys", 8, "--causal", "--scores-limit", 16]),
    "spans": (
        spans.CONTEST,
        [
            *("--limits", 256, "--memory-limits", "--positions", "rope", "--hidden-size", 16, "--num-heads", 4),
            *("--intermediate-size", 32, "--layers", 3, "--segment-tokens", 32, "--decode-tokens", 1),
        ],
    ),
    "blocks": (
        blocks.CONTEST,
        [
            *("--hidden-size", 16, "--num-layers", 2, "--num-heads", 2, "--intermediate-size", 32, "--vocab-size", 64),
            *("--batch-size", 2, "--tokens", 8, "--prompt-tokens", 4, "--decode-tokens", 3, "--no-memory"),
        ],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_scripts_write_results_tables_and_a_picture(name: str, tmp_path: Path) -> None:
    contest, options = CASES[name]
    contest.run(None, [*map(str, [*options, *TIMED]), "--output", str(tmp_path)])
    found = json.loads((tmp_path / f"{contest.name}.json").read_text())
    assert {row[contest.kind] for row in found["results"]} == set(found["settings"][f"{contest.kind}s"])
    assert (tmp_path / f"{contest.name}.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert contest.markdown(found) == (tmp_path / f"{contest.name}.md").read_text().strip()


@pytest.mark.parametrize(
    "script", [blocks, content, etc, mechanisms, spans, star, trees], ids=lambda each: each.__name__
)
def test_scripts_explain_themselves(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        script.CONTEST.run(script.__doc__, ["--help"])
    assert f"python model_cards/benchmarks/{script.__name__}.py" in capsys.readouterr().out


@pytest.mark.thorough
def test_processes_send_as_many_bytes_as_is_said(tmp_path: Path) -> None:
    """What `explain` says is compared by the script itself."""
    sizes = ["--tokens", "256", "--heads", "2", "--key-heads", "1", "--head-dim", "8", "--repeats", "1"]
    options = ["--pattern", "band(16, 0) | global(0)", "--processes", "2", "--gigabits", "0"]
    command = [sys.executable, str(SCRIPTS / "sequence.py"), *sizes, *options, "--output", str(tmp_path)]
    subprocess.run(command, check=True)
    rows = json.loads((tmp_path / "sequence.json").read_text())["results"]
    assert [row["way"] for row in rows] == ["halo", "halo, waiting", "all-gather", "heads"]
    # keys and values of 16 tokens at the edge and of the first one, and its query in two heads, against 128 tokens
    assert {row["forward_bytes"] for row in rows if row["way"].startswith("halo")} == {(17 + 1) * 2 * 8 * 4}


@pytest.mark.parametrize(
    ("contest", "options", "field"),
    [
        (content.CONTEST, ["--lengths", "100"], "hash_chunk_tokens"),
        (mechanisms.CONTEST, ["--causal", "--mechanisms", "star"], "star"),
        (mechanisms.CONTEST, ["--repeats", "512"], "repeats"),
        (spans.CONTEST, ["--decode-batch-sizes", "1", "0"], "decode_batch_sizes"),
        (spans.CONTEST, ["--attention-dropout", "1"], "attention_dropout"),
        (blocks.CONTEST, ["--num-heads", "5"], "num_attention_heads"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    contest: Contest, options: list[str], field: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refusal:
        contest.run(None, options)
    assert refusal.value.code == 2
    assert field in capsys.readouterr().err


def test_counts_of_the_paper() -> None:
    for row in blocks.paper_counts():
        millions = row[row["counted"]] / 1e6
        assert row["paper"] in (f"{millions:.0f}M", f"{millions:.1f}M")
