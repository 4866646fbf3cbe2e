"""Contexts of an ETC, and aligned sentences of a bp_seq2seq, in several processes: they train as one does.

Two processes (gloo, CPU) and one alone run `numbered_script.py`.
"""

import json
from pathlib import Path

import pytest
import torch
from distributed import run_distributed
from processes.numbered_script import CASES, WAYS
from processes.steps import largest_difference

SCRIPT = Path(__file__).parent / "numbered_script.py"
# both add the same numbers in another order
TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where one and two processes have written."""
    found = tmp_path_factory.mktemp("numbered")
    for processes in (1, 2):
        run_distributed(SCRIPT, found, world_size=processes)
    return found


@pytest.mark.parametrize("name", CASES)
def test_two_processes_train_as_one(folder: Path, name: str) -> None:
    """With DDP that looks for no unused parameters, checkpointed, and with weights in shards."""
    found = json.loads((folder / "report.json").read_text())[name]
    # else processes that are told nothing by the others, or no numbers, would pass, too
    assert found.pop("apart") > 1000 * TOLERANCE
    assert found.pop("without") > 1000 * TOLERANCE
    assert found.keys() == {*WAYS}
    assert max(found.values()) <= TOLERANCE


@pytest.mark.parametrize("name", CASES)
def test_trainer_deals_numbers_out_with_their_tokens(folder: Path, name: str) -> None:
    alone, together = (torch.load(folder / f"{name}-{processes}.pt") for processes in (1, 2))
    assert largest_difference(alone, together) <= TOLERANCE
