"""Two processes with a part of the examples each train as one process with all of them: every head of every family."""

import json
from pathlib import Path
from typing import Any

import pytest
from distributed import run_distributed
from families import BY_NAME
from models_cases import case_param
from processes.data_parallel_script import pairs

SCRIPT = Path(__file__).parent / "data_parallel_script.py"
# both add the same numbers in another order
TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def report(thorough: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the two processes wrote."""
    folder = tmp_path_factory.mktemp("data_parallel")
    run_distributed(SCRIPT, folder, *thorough)
    return json.loads((folder / "report.json").read_text())


@pytest.mark.parametrize(
    ("name", "head"),
    [
        case_param(name, head, name=f"{name}-{head}", is_thorough=head != BY_NAME[name].main_head)
        for name, head in pairs()
    ],
)
def test_two_processes_train_as_one_and_no_parameter_is_unused(report: dict[str, Any], name: str, head: str) -> None:
    """With DDP that looks for no unused parameters; main heads also with checkpointed activations."""
    found = report[f"{name}-{head}"]
    assert found.pop("moved") > 1000 * TOLERANCE
    # else processes that are told nothing by the others would pass, too
    assert found.pop("apart") > 1000 * TOLERANCE
    assert found
    for way, difference in found.items():
        assert isinstance(difference, float), f"{way}: {difference}"
        assert difference <= TOLERANCE, way


def test_every_head_of_every_family_takes_part() -> None:
    heads = {BY_NAME[name].heads[head] for name, head in pairs()}
    assert heads == {head for case in BY_NAME.values() for head in case.heads.values()}
