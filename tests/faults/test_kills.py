"""Processes that are killed at random moments lose nothing; the full run is in model_cards/engine.md."""

import json
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]


# huggingface_hub reads the address of the Hub as it is imported, so that the process is a fresh one
def test_a_few_kills_of_each_kind() -> None:
    words = [sys.executable, "-m", "faults", "--kills", "8", "--seed", "3"]
    done = subprocess.run(words, cwd=TESTS, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    assert (answer["kills"], answer["lost"]) == (8, 0)
    assert answer["before_the_end"].keys() == {"training", "conversion", "push", "pull"}
    assert sum(answer["before_the_end"].values()) >= 3
