"""model_cards/record.py: what an example has measured, kept for the cards."""

import json
import sys
from pathlib import Path

import pytest
from distributed import run_fresh
from own_files import own, write_own_files
from run_example import EXAMPLES, environment

RECORD = EXAMPLES.parent / "model_cards" / "record.py"


def record(folder: Path, *words: str) -> None:
    done = run_fresh([sys.executable, RECORD, "--to", ".", *words], folder, environment(folder))
    assert done.returncode == 0, done.stderr


@pytest.mark.thorough
def test_a_run_is_kept_with_its_command_and_its_processor_seconds(tmp_path: Path) -> None:
    write_own_files(tmp_path)
    options = own("run_summarization")
    record(tmp_path, "run_summarization", "--name", "tiny", "--note", "a test", "--", *options)
    found = json.loads((tmp_path / "tiny.json").read_text())
    assert found["command"] == " ".join(["python examples/run_summarization.py", *options])
    assert found["note"] == "a test"
    assert found["cpu_seconds"] > 0
    assert found["metrics"] == json.loads((tmp_path / "outputs" / "tiny" / "all_results.json").read_text())
    assert [row["summary"] for row in found["samples"]][0].startswith("entry ")
    assert found["machine"]["device"] in ("cpu", "cuda")


@pytest.mark.parametrize("folder", ["compare_blocks"])
def test_results_of_an_experiment_are_kept_as_they_are(folder: str, tmp_path: Path) -> None:
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "results.json").write_text('{"rows": [1]}')
    record(tmp_path, folder, "--note", "idle")
    assert json.loads((tmp_path / f"{folder}.json").read_text()) == {"rows": [1], "note": "idle"}
