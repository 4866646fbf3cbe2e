"""A part of the sweep over transformers' classes: some that are unlike.

`python -m sweep` runs all of it, as continuous integration does.
"""

import pytest
import transformers

from sweep.classes import Candidate
from sweep.table import BEGIN, END, PAGE, markdown, verdicts
from sweep.verdict import NOT_BUILT, WRONG, quietly

# one of each way to be right or refused, with full attention and with a pattern
UNLIKE = ("BigBirdPegasusForCausalLM", "DeepseekV32ForCausalLM", "DogeForCausalLM", "ModernBertForMaskedLM")
KNOWN = {each["name"]: each for each in verdicts()["classes"]}


@pytest.mark.parametrize("name", UNLIKE)
def test_right_or_refused(name: str) -> None:
    known = KNOWN[name]
    verdict = quietly(Candidate(known["model_type"], known["kind"], name))
    assert WRONG not in (verdict.own, verdict.sparse), verdict
    # another version, or libraries that are missing here, may make another verdict
    if verdicts()["transformers"] == transformers.__version__ and verdict.own != NOT_BUILT:
        assert (verdict.own, verdict.sparse) == (known["own"], known["sparse"]), verdict


def test_nothing_is_known_to_be_wrong() -> None:
    assert not [each for each in verdicts()["classes"] if WRONG in (each["own"], each["sparse"])]


def test_the_table_of_the_readme_is_that_of_the_verdicts() -> None:
    """Written by `python -m sweep.table`."""
    assert PAGE.read_text().split(BEGIN)[1].split(END)[0].strip() == markdown(verdicts())
