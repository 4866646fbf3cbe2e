"""Every text model of the sweep that our attention computes, on two processes: right, or refused with a sentence.

Called with token ids, padding on either side, embeddings, labels and positions, with a pattern and in float64 where the
model can; then with rotary frequencies that depend on the length of the text.
"""

import json
from pathlib import Path

import pytest
from distributed import run_distributed

from sweep.classes import CAUSAL, ENCODER
from sweep.table import verdicts
from sweep.verdict import RIGHT, WRONG

SCRIPT = Path(__file__).parents[1] / "sharded_sweep_script.py"
SHARES = 8
CLASSES = [each["name"] for each in verdicts()["classes"] if each["kind"] in (CAUSAL, ENCODER) and each["own"] == RIGHT]


@pytest.mark.thorough
@pytest.mark.parametrize("share", range(SHARES))
def test_processes_compute_what_one_does(tmp_path: Path, share: int) -> None:
    names = CLASSES[share::SHARES]
    run_distributed(SCRIPT, tmp_path, *names)
    found = json.loads((tmp_path / "verdicts.json").read_text())
    assert found.keys() == {*names}
    assert not {name: each for name, each in found.items() if any(WRONG in said for said in each.values())}
    # more than half can be shared
    assert 2 * sum(RIGHT in each.values() for each in found.values()) > len(names)
