"""Trainer on two processes ends with the weights of Trainer on one, however it is told to train.

Two processes (gloo, CPU) and one alone run `trainer_script.py`.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_distributed
from processes.steps import largest_difference
from processes.trainer_script import CASES, IN_EVERY_WAY, OFTEN, RESUMED, STEPS, WAYS

import hf_efficient_attn as hea
from hf_efficient_attn.training.complete_checkpoints import why_incomplete

SCRIPT = Path(__file__).parent / "trainer_script.py"
# both add the same numbers in another order: some ten roundings of weights of order 0.1 were measured, 1.3e-6 at most
TOLERANCE = 3e-6
# what a step that differs moves
MOVED = 1e-3
every_way = pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in IN_EVERY_WAY else pytest.mark.thorough) for name in CASES]
)


@pytest.fixture(scope="module")
def runs(thorough: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The folders that one and two processes wrote, by number of processes."""
    folders = {processes: tmp_path_factory.mktemp(f"trainer_{processes}") for processes in (1, 2)}
    for processes, folder in folders.items():
        run_distributed(SCRIPT, folder, *thorough, world_size=processes)
    return folders


def weights(folder: Path, family: str, way: str) -> dict[str, torch.Tensor]:
    return torch.load(folder / f"{family}-{way}.pt")


def report(folder: Path, family: str, way: str) -> dict[str, Any]:
    return json.loads((folder / "report.json").read_text())[f"{family}-{way}"]


@pytest.mark.parametrize(
    ("family", "way"),
    [
        pytest.param(
            name,
            way,
            marks=()
            if name in IN_EVERY_WAY or way in OFTEN or (name in RESUMED and way in ("best", "resumed"))
            else pytest.mark.thorough,
        )
        for name in CASES
        for way in [*WAYS, "resumed"]
    ],
)
def test_two_processes_end_with_the_weights_of_one(runs: dict[int, Path], family: str, way: str) -> None:
    start, alone, together = (
        weights(folder, family, state) for folder, state in ((runs[1], "start"), (runs[1], way), (runs[2], way))
    )
    assert largest_difference(start, alone) > MOVED
    assert largest_difference(alone, together) <= TOLERANCE
    for processes, folder in runs.items():
        said = report(folder, family, way)
        assert (said["steps"], said["processes"]) == (STEPS, processes)
        assert said.get("finds_unused") in (False, None)
    assert report(runs[2], family, "plain")["finds_unused"] is False


@every_way
def test_ways_were_what_they_claim(runs: dict[int, Path], family: str) -> None:
    for folder in runs.values():
        assert [report(folder, family, way)["is_checkpointing"] for way in ("plain", "checkpointed")] == [False, True]
        assert report(folder, family, "best")["best"] == "checkpoint-1"
    plain = weights(runs[1], family, "plain")
    for way in ("accumulated", "uneven", "best"):
        assert largest_difference(plain, weights(runs[1], family, way)) > MOVED


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in RESUMED else pytest.mark.thorough) for name in CASES]
)
def test_resuming_changes_nothing(runs: dict[int, Path], family: str, processes: int) -> None:
    """Weights, optimizer and order of the examples come back from the checkpoint: equal to the last bit."""
    whole, resumed = (weights(runs[processes], family, way) for way in ("plain", "resumed"))
    assert largest_difference(whole, resumed) == 0


@pytest.mark.parametrize("processes", [1, 2])
def test_a_checkpoint_needs_the_random_states_of_all_processes(
    runs: dict[int, Path], processes: int, tmp_path: Path
) -> None:
    saved = runs[processes] / "sparse_seq2seq-best" / "checkpoint-1"
    copy = Path(shutil.copytree(saved, tmp_path / "checkpoint-1"))
    names = [f"rng_state_{process}.pth" for process in range(processes)] if processes > 1 else ["rng_state.pth"]
    for name in names:
        assert hea.last_complete_checkpoint(tmp_path) == str(copy)
        (copy / name).rename(tmp_path / name)
        assert why_incomplete(copy) == f"{name} is missing."
        (tmp_path / name).rename(copy / name)
