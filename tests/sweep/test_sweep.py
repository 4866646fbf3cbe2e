"""A part of the sweep over transformers' classes: a fixed choice of unlike ones, and another share every day.

`python -m sweep` runs all of it, as continuous integration does.
"""

import datetime

import pytest
import transformers

from sweep.classes import Candidate
from sweep.table import BEGIN, END, PAGE, markdown, verdicts
from sweep.verdict import NOT_BUILT, WRONG, quietly

# one of each way to be right or refused
FIXED = (
    "BigBirdPegasusForCausalLM",
    "BigBirdPegasusForConditionalGeneration",
    "DeepseekV32ForCausalLM",
    "DogeForCausalLM",
    "FNetForMaskedLM",
    "Gemma2ForCausalLM",
    "GPT2LMHeadModel",
    "LayoutLMForMaskedLM",
    "Llama4ForCausalLM",
    "MixtralForCausalLM",
    "ModernBertForMaskedLM",
    "NllbMoeForConditionalGeneration",
    "SwitchTransformersForConditionalGeneration",
    "ViTForImageClassification",
)
SHARES = 100
SLOW = ("KimiLinearForCausalLM", "PegasusXForConditionalGeneration")


def chosen() -> list[Candidate]:
    """Return the classes to try today, out of the committed ones: to look for all of them takes long."""
    today = datetime.datetime.now(datetime.timezone.utc).toordinal() % SHARES
    known = [Candidate(each["model_type"], each["kind"], each["name"]) for each in verdicts()["classes"]]
    share = [each for each in known[today::SHARES] if each.name not in SLOW]
    fixed = [each for each in known if each.name in FIXED]
    return sorted({*share, *fixed}, key=lambda each: each.name)


def test_every_fixed_class_is_tried() -> None:
    assert {each.name for each in chosen()} >= set(FIXED)


@pytest.mark.parametrize("candidate", chosen(), ids=lambda each: each.name)
def test_right_or_refused(candidate: Candidate) -> None:
    verdict = quietly(candidate)
    assert WRONG not in (verdict.own, verdict.sparse), verdict
    table = verdicts()
    # another version, or libraries that are missing here, may make another verdict
    if table["transformers"] == transformers.__version__ and verdict.own != NOT_BUILT:
        known = {each["name"]: (each["own"], each["sparse"]) for each in table["classes"]}
        assert (verdict.own, verdict.sparse) == known[candidate.name], verdict


def test_nothing_is_known_to_be_wrong() -> None:
    assert not [each for each in verdicts()["classes"] if WRONG in (each["own"], each["sparse"])]


def test_the_table_of_the_readme_is_that_of_the_verdicts() -> None:
    """Written by `python -m sweep.table`."""
    assert PAGE.read_text().split(BEGIN)[1].split(END)[0].strip() == markdown(verdicts())
