"""Two processes train as one does, and a checkpoint continues as if there had been no break.

Two processes (gloo, CPU) and one alone run `ddp_script.py`; the tests compare what they saved.
"""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_distributed, run_fresh

import hf_efficient_attn as hea
from hf_efficient_attn.training.complete_checkpoints import why_incomplete

SCRIPT = Path(__file__).parent / "ddp_script.py"
PROCESSES = (1, 2)
BLOCKS = ("sas", "pre_ln")
# Both runs add the same numbers in another order. A weight of order 1 is rounded to 6e-8 at each of the 6 steps, and
# clipping and momentum carry the gradients' relative error of 1e-7 on: 1e-7 in all was measured, here with some room.
# Real differences are far larger: the steps move weights by 0.08, and averaging each process's mean loss, instead of
# the losses of all tokens, ends 0.015 away.
TOLERANCE = 5e-6

Load = Callable[[int, str, str], dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The folders that one and two processes wrote, by number of processes."""
    folders = {processes: tmp_path_factory.mktemp(f"processes_{processes}") for processes in PROCESSES}
    for processes, folder in folders.items():
        run_distributed(SCRIPT, folder, world_size=processes)
    return folders


@pytest.fixture(scope="module")
def load(runs: dict[int, Path]) -> Load:
    return lambda processes, block, state: torch.load(runs[processes] / f"{block}-{state}.pt")


def report(folder: Path, block: str) -> dict[str, Any]:
    return json.loads((folder / "report.json").read_text())[block]


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max((one[name] - other[name]).abs().max().item() for name in one)


@pytest.mark.parametrize("block", BLOCKS)
def test_runs_were_what_they_claim(runs: dict[int, Path], block: str) -> None:
    """Two processes really trained, with checkpointed activations and DDP that allows no parameter without gradient."""
    one, two = report(runs[1], block), report(runs[2], block)
    assert (one["world_size"], two["world_size"]) == (1, 2)
    assert one["steps"] == two["steps"] == [6, 6]
    assert one["is_checkpointing"] is two["is_checkpointing"] is True
    assert two["find_unused_parameters"] is False


@pytest.mark.parametrize("block", BLOCKS)
def test_two_processes_end_with_the_weights_of_one(load: Load, block: str) -> None:
    """Same global batches, also where the processes hold different numbers of labels: same weights up to rounding."""
    start, one, two = load(1, block, "start"), load(1, block, "whole"), load(2, block, "whole")
    assert largest_difference(start, load(2, block, "start")) == 0
    unmoved = [name for name in start if torch.equal(start[name], one[name])]
    assert not unmoved
    assert largest_difference(start, one) > 1000 * TOLERANCE
    assert largest_difference(one, two) < TOLERANCE


@pytest.mark.neighbours
def test_torchrun_itself_starts_the_same(load: Load, tmp_path: Path) -> None:
    """Launcher and processes import everything anew, which takes half a minute."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = run_fresh([*launcher, SCRIPT, tmp_path])
    assert done.returncode == 0, done.stderr
    for block in BLOCKS:
        for state in ("start", "whole", "resumed"):
            assert largest_difference(torch.load(tmp_path / f"{block}-{state}.pt"), load(2, block, state)) == 0


@pytest.mark.parametrize("processes", PROCESSES)
@pytest.mark.parametrize("block", BLOCKS)
def test_resuming_changes_nothing(load: Load, block: str, processes: int) -> None:
    """Weights, optimizer and data order come back from the checkpoint: equal to the last bit."""
    assert largest_difference(load(processes, block, "whole"), load(processes, block, "resumed")) == 0


@pytest.mark.parametrize("processes", PROCESSES)
def test_a_checkpoint_needs_the_random_states_of_all_processes(
    runs: dict[int, Path], processes: int, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(runs[processes] / "sas" / "checkpoint-3", tmp_path / "checkpoint-3"))
    names = [f"rng_state_{process}.pth" for process in range(processes)] if processes > 1 else ["rng_state.pth"]
    for name in names:
        assert hea.last_complete_checkpoint(tmp_path) == str(copy)
        (copy / name).rename(tmp_path / name)
        assert why_incomplete(copy) == f"{name} is missing."
        (tmp_path / name).rename(copy / name)
