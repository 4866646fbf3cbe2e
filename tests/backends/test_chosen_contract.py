"""Chosen keys, compared with `reference` in float64: every choice at odd lengths, masked and packed, in every dtype."""

from collections.abc import Iterator

import pytest
import torch
from backends.chosen_cases import special_cases, varied_cases
from backends_cases import Case, tensors_of
from backends_contract import check
from chosen_choices import CHOICES

from hf_efficient_attn.backends import sdpa
from hf_efficient_attn.backends.gathered import backend as gathered

CASES = [*varied_cases(), *special_cases()]


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan() -> Iterator[None]:
    """Whatever is read before it was written shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.thorough] * (number % 2)) for number, case in enumerate(CASES)],
    ids=str,
)
def test_contract(case: Case) -> None:
    assert gathered.why_not(case.call()) is None
    check(case, gathered)


@pytest.mark.parametrize("case", [case for case in special_cases() if sdpa.why_not(case.call()) is None], ids=str)
def test_contract_of_all_pairs(case: Case) -> None:
    check(case, sdpa)


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("mask", ["right", "holes", "documents"])
def test_finite_numbers_of_masked_tokens_change_nothing(mask: str, choice: str) -> None:
    case = Case("causal", 50, mask, choice=choice)
    call, found = case.call(), []
    assert call.masked_queries is not None
    for garbage in (0.0, 1e15):
        tensors = tensors_of(case, torch.float32)
        leaves = [
            x.masked_fill(call.masked_queries, garbage).requires_grad_() for x in (tensors.q, tensors.k, tensors.v)
        ]
        out, _ = gathered.attend(*leaves, call)
        gradients = torch.autograd.grad(out, leaves, tensors.grad_out)
        assert all(not gradient.masked_select(call.masked_queries).any() for gradient in gradients)
        found.append([out, *gradients])
    torch.testing.assert_close(*found)
