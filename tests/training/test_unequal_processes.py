"""Two processes that would train different models say so at the first step, and equal ones train."""

from pathlib import Path

import pytest
from torchrun import torchrun

SCRIPT = Path(__file__).parent / "unequal_script.py"


@pytest.fixture(scope="module")
def raised() -> dict[tuple[str, int], str]:
    """Return what was raised, by case and rank; rank 1 comes last."""
    lines = [line.split("|", 2) for line in torchrun(SCRIPT).splitlines() if line.count("|") >= 2]
    return {(name, int(rank)): message for rank, name, message in lines}


def test_equal_processes_train_and_one_may_evaluate_alone(raised: dict[tuple[str, int], str]) -> None:
    for name in ("equal", "again", "equal spans"):
        assert raised[name, 0] == raised[name, 1] == "nothing"
    assert raised["alone", 0] == "nothing"


@pytest.mark.parametrize(
    ("name", "field", "values"),
    [
        ("pattern", "attention_pattern", ("'left': 4", "'left': 5")),
        ("spans", "span_limit", ("8", "9")),
        ("block", "block", ("'sas'", "'sas_p'")),
        ("encoder", "attention_pattern", ("'left': 2", "'left': 3")),
    ],
)
def test_unequal_processes_name_both_values(
    raised: dict[tuple[str, int], str], name: str, field: str, values: tuple[str, str]
) -> None:
    assert raised[name, 0] == "nothing"
    message = raised[name, 1]
    assert f"{field} is " in message
    before, after = message.split(" on rank 0 and ")
    assert values[0] in before
    assert values[1] in after.split(" on rank 1.")[0]
