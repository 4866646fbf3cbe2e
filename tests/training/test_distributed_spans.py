"""Two processes learn the spans that one does.

Two processes (gloo, CPU) and one alone run `ddp_spans_script.py`.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from distributed import run_distributed

SCRIPT = Path(__file__).parent / "ddp_spans_script.py"
PROCESSES = (1, 2)
KINDS = ("adaptive", "dynamic")
# the same numbers added in another order, at each of six steps; the steps move weights by up to 0.07 each
TOLERANCE = 5e-6

Load = Callable[..., dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """Run everything once; return a function from kind, texts and process to what was saved."""
    folder = tmp_path_factory.mktemp("spans")
    for processes in PROCESSES:
        (folder / str(processes)).mkdir()
        run_distributed(SCRIPT, folder / str(processes), world_size=processes)

    def saved(kind: str, texts: str, processes: int, process: int = 0) -> dict[str, torch.Tensor]:
        weights = torch.load(folder / str(processes) / f"{kind}-{texts}-{process}.pt")
        assert int(weights.pop("world_size")) == processes
        return weights

    return saved


def spans_of(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in weights.items() if ".spans." in name}


@pytest.mark.parametrize("kind", KINDS)
def test_both_processes_hold_the_same_spans(load: Load, kind: str) -> None:
    first, second = (load(kind, "AB", 2, process) for process in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first if name != "average_span")


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_on_two_texts_are_one_on_both(load: Load, kind: str) -> None:
    """Each process reads on in its own rows, and the penalty counts once: up to rounding the run of one process."""
    one, two, other = load(kind, "AB", 1), load(kind, "AB", 2), load(kind, "A", 1)
    for name in spans_of(one):
        torch.testing.assert_close(one[name], two[name], rtol=0, atol=TOLERANCE)
        assert (one[name] - other[name]).abs().max() > 100 * TOLERANCE
