"""A real pretrained BERT made long, by the example that does it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from forked import server
from run_example import EXAMPLES


def is_offline(message: str) -> bool:
    """Return whether the package client found no way out; a registry that answers, or a damaged file, is a failure."""
    return re.search(r"name resolution|connection|unreachable|timed out|network", message, re.IGNORECASE) is not None


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, EXAMPLES / "convert_checkpoint.py", "--output_dir", folder / "run", *words]
    return server().run(command)


def test_minilm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Short texts keep their embeddings; documents of 1,024 tokens are nearest to the sentence on their topic."""
    done = run(tmp_path, "--max_length", "1024")
    if done.returncode == 2 and "could not be had" in done.stderr and is_offline(done.stderr):
        with capsys.disabled():
            print(f"\nskipped, as this machine is offline: {done.stderr.strip()}")
        pytest.skip(f"this machine is offline: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["largest_difference_of_sentences"] < 1e-5
    differences = results["largest_difference_at_tokens"]
    assert set(differences) == {"257", "512"}
    assert differences["257"] < 1e-5 < differences["512"]
    assert set(results["document_tokens"].values()) == {1024}
    for topic, row in results["similarity"].items():
        assert max(row, key=row.get) == topic, results["similarity"]
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        "long",
        "results.json",
        "similarities.png",
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--attention_window", "7"], "attention_window=7"),
        (["--max_length", "0"], "max_length=0"),
        (["--max_len", "64", "--window", "8"], "Unknown option --window."),
        (["--model_name_or_path", "/nothing/here"], "is no folder here"),
    ],
)
def test_user_errors_are_one_line(tmp_path: Path, words: list[str], message: str) -> None:
    done = run(tmp_path, *words)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1
    assert message in done.stderr
    assert not (tmp_path / "run").exists()
