"""The script of random calls: it knows every kind of pattern, finds nothing in a few calls, and sees a fault."""

import random

import pytest
from fuzz_cases import draw_case
from fuzz_engine import faults
from fuzz_formula import READ

from hf_efficient_attn.backends import reference, sdpa
from hf_efficient_attn.patterns import Pattern

SEED = 0


def test_every_kind_of_pattern_has_a_formula() -> None:
    assert set(READ) == {
        kind
        for kind, found in Pattern.kinds.items()
        if found.__module__.startswith("hf_efficient_attn") and not found.chooses_by_content
    }


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_few_random_calls() -> None:
    for number in range(25):
        assert not faults(draw_case(random.Random(f"{SEED} {number}"))), number


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_fault_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backends that read all keys, whatever the pattern and the masks say."""
    monkeypatch.setattr(sdpa, "additive_mask", lambda *arguments: (None, None))
    monkeypatch.setattr(reference, "allowed_pairs", lambda *arguments: None)
    cases = (draw_case(random.Random(f"{SEED} {number}")) for number in range(60))
    assert sum(bool(faults(case)) for case in cases if case.backend in ("sdpa", "reference")) > 5
