"""Trainer on processes that share texts: the losses and weights of one process, also where it evaluates and resumes.

Processes (gloo, CPU) and one alone run `sharded_trainer_script.py`.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_distributed
from sharded_trainer_script import STEPS

SCRIPT = Path(__file__).parents[1] / "sharded_trainer_script.py"


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """What one, two and twice two processes found."""
    folder = tmp_path_factory.mktemp("shared_texts")
    for processes in (1, 2, 4):
        run_distributed(SCRIPT, folder, world_size=processes)
    return {processes: torch.load(folder / f"{processes}.pt") for processes in (1, 2, 4)}


@pytest.mark.parametrize("processes", [2, 4])
def test_processes_train_as_one(reports: dict[int, dict[str, Any]], processes: int) -> None:
    """Accumulated batches, checkpointing, clipping and evaluations under DistributedDataParallel."""
    alone, together = reports[1]["whole"], reports[processes]["whole"]
    assert together["texts"] == alone["texts"]
    names = {"loss", "eval_even_loss", "eval_uneven_loss"}
    assert together["losses"].keys() == alone["losses"].keys() == names
    # of two groups, one fills the last batch with the first text, as in plain data parallelism
    for name in names if processes == 2 else names - {"eval_uneven_loss"}:
        assert len(set(alone["losses"][name])) == STEPS
        assert together["losses"][name] == pytest.approx(alone["losses"][name], abs=2e-6), name
    for name, expected in alone["weights"].items():
        torch.testing.assert_close(together["weights"][name], expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("processes", [2, 4])
def test_a_training_resumes_in_the_second_epoch(reports: dict[int, dict[str, Any]], processes: int) -> None:
    """With the texts that come next: equal to the last bit, but for the order in which gradients of four are added."""
    whole, resumed = reports[processes]["whole"], reports[processes]["resumed"]
    rounding = 1e-7 if processes == 4 else 0
    for name, expected in whole["losses"].items():
        assert resumed["losses"][name] == pytest.approx(expected, abs=20 * rounding, rel=0), name
    for name, expected in whole["weights"].items():
        torch.testing.assert_close(resumed["weights"][name], expected, atol=rounding, rtol=0)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("logits", "every process has only the logits of its own tokens"),
        ("order", "train_sampling_strategy is 'group_by_length'"),
        ("stream", "Process 0 distributes different examples of a Stream"),
        ("mesh", "have the ranks 0, 2, but"),
        ("smoothing", "computes the loss itself, without the tokens of other processes. Set"),
        ("smoothed evaluation", "label_smoothing_factor=0.25"),
        ("loss", "but the labels of whole texts"),
    ],
)
def test_what_is_refused(reports: dict[int, dict[str, Any]], what: str, message: str) -> None:
    assert message in reports[4]["said"][what]
