"""Chosen keys, compared with `reference` in float64: every choice at odd lengths, masked and packed, in every dtype."""

from collections.abc import Iterator

import pytest
import torch
from backends_cases import MEMORY, Case, tensors_of
from backends_contract import check
from chosen_choices import CHOICES

from hf_efficient_attn.backends import sdpa
from hf_efficient_attn.backends.gathered import backend as gathered
from hf_efficient_attn.layout.terms import Distance, SoftSpan

MASKS = ("none", "left", "right", "holes", "documents", "globals")
PATTERNS = ("causal", "full", "band", "causal band", "per head", "earlier keys", "globals")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
HEADS = ((4, 2), (2, 2), (6, 1))


def varied_cases() -> Iterator[Case]:
    """Yield cases in which every choice meets every mask, pattern, dtype, length and number of heads."""
    for number, choice in enumerate(CHOICES):
        for turn, num_keys in enumerate((65, 130, 1, 64, 33, 7, 96)):
            mask, pattern = MASKS[(number + turn) % len(MASKS)], PATTERNS[(number // 2 + turn) % len(PATTERNS)]
            dtype, heads = DTYPES[(number + 3 * turn) % len(DTYPES)], HEADS[(number + turn) % len(HEADS)]
            yield Case(pattern, num_keys, mask, dtype, heads, choice=choice)


def special_cases() -> Iterator[Case]:
    """Yield decoding, terms, sinks, soft caps, other memory and widths, two axes."""
    memory = list(MEMORY)
    for number, choice in enumerate(CHOICES):
        mask = MASKS[number % 5]
        yield Case("causal", 90, mask, num_queries=1 + 20 * (number % 2), choice=choice)
        yield Case("causal", 70, mask, label=Distance(-3, 6), choice=choice, has_own_values=number % 2 == 0)
        yield Case("band", 70, mask, label=SoftSpan(ramp=20), choice=choice)
        yield Case("causal", 70, mask, softcap=1.5, value_dim=24, choice=choice)
        if choice != "mean of groups":
            yield Case("causal", 70, mask, has_sinks=True, choice=choice, softcap=2.0 if number % 2 else None)
        yield Case(
            "causal", 50, mask, memory=tuple(memory[(number + 3 * i) % len(memory)] for i in range(4)), choice=choice
        )
        if not choice.startswith("order"):
            other = mask if mask in ("left", "right", "none") else "holes"
            yield Case("full", 40, other, num_queries=60, cross_offset=3, choice=choice)
        yield Case("causal", 60, "holes", DTYPES[number % 3], score_factor=100, choice=choice)
    places = {"label": Distance(-3, 6), "choice": "groups of places"}
    yield Case("causal", 200, num_queries=9, **places)
    yield Case("band", 200, "left", num_queries=9, has_own_values=True, **places)


CASES = [*varied_cases(), *special_cases()]


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan() -> Iterator[None]:
    """Whatever is read before it was written shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("case", CASES, ids=str)
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
