"""Calls that are computed in many pieces equal the formula, with what pieces share of terms and drop of weights."""

import pytest
import torch
from torch import Tensor

import hf_efficient_attn as hea
from hf_efficient_attn.backends.blocked import execute
from hf_efficient_attn.layout.score_terms import Distance, Label, Slope, SoftSpan, Term
from hf_efficient_attn.patterns import Band, Causal, Dilated, Full, GlobalTokens, Pattern, PerHead, RandomBlocks

TOKENS = 41
MASKS: dict[str, dict[str, Tensor]] = {
    "none": {},
    "padded": {"key_mask": torch.arange(TOKENS) >= torch.tensor([[4], [0]])},
    "packed": {"segment_ids": torch.tensor([[0] * 13 + [1] * 28, [0] * 30 + [3] * 11])},
}
PATTERNS = [
    Full(),
    Causal(),
    Band(10, 10) | GlobalTokens([0]),
    Dilated(6, 6, 3),
    PerHead([Band(3, 3), Full(), Causal(), Band(50, 2)]),
]
LABELS: list[tuple[Label, int]] = [(Distance(-7, 9), 17), (Distance(0, 40), 41), (Slope(), 1), (SoftSpan(3), 1)]


def states() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, heads, TOKENS, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]


# so many scores at a time: all, or those of some queries
@pytest.mark.parametrize("most", [execute.MAX_SCORES, 700])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_terms_by_distance(pattern: Pattern, mask: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execute, "MAX_SCORES", most)
    for number, (label, num_values) in enumerate(LABELS):
        # of each example and head, of a head, or of all: patterns and masks take turns
        sizes = ((1, 4), (2, 4), (1, 1))[(number + PATTERNS.index(pattern) + list(MASKS).index(mask)) % 3]
        values = torch.rand(*sizes, 1, num_values, dtype=torch.float64)
        values = (values * 20 if isinstance(label, SoftSpan) else values).requires_grad_()
        leaves, found = [*states(), values], []
        for backend in ("blocked", "reference"):
            terms = (Term(values, label),)
            out = hea.attention(*leaves[:3], pattern, terms=terms, backend=backend, **MASKS[mask])
            found.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
        for own, expected in zip(*found, strict=True):
            torch.testing.assert_close(own, expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("pattern", [Full(), RandomBlocks(2, 2, seed=0)], ids=str)
def test_the_backward_pass_drops_what_the_forward_pass_did(pattern: Pattern, monkeypatch: pytest.MonkeyPatch) -> None:
    """Central differences under the same draw, which each piece makes for itself."""
    monkeypatch.setattr(execute, "MAX_SCORES", 200)
    leaves = states()

    def loss(*given: Tensor) -> Tensor:
        torch.manual_seed(1)
        return hea.attention(*given, pattern, dropout=0.3, backend="blocked").square().sum()

    for index, gradient in enumerate(torch.autograd.grad(loss(*leaves), leaves)):
        step = torch.randn_like(gradient) * 1e-5
        ends = [
            loss(*(leaf + sign * step if i == index else leaf for i, leaf in enumerate(leaves))) for sign in (1, -1)
        ]
        torch.testing.assert_close((ends[0] - ends[1]) / 2, (gradient * step).sum(), rtol=1e-4, atol=1e-9)
