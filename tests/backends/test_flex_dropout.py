"""Which weights flex drops: as many as asked for, and none because of another."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_efficient_attn.backends.flex import backend as flex
from hf_efficient_attn.backends.flex.mods import Dropout, Mods, mods_of
from hf_efficient_attn.layout.call import AttentionCall, inputs_of
from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.patterns.bands import Band

SIZES = (3, 4, 300, 500)


def kept(probability: float, seed: int) -> torch.Tensor:
    places = [torch.arange(size).reshape(-1, *[1] * (3 - dim)) for dim, size in enumerate(SIZES)]
    return Dropout(probability, torch.tensor(seed, dtype=torch.int32)).is_kept(*places)


def test_drops_as_many_weights_as_asked_for_in_rows_and_columns() -> None:
    for probability in (0.01, 0.3, 0.9):
        drawn, variance = kept(probability, 5).double(), probability * (1 - probability)
        assert drawn.shape == SIZES
        assert abs(drawn.mean() - (1 - probability)) < 4 * (variance / drawn.numel()) ** 0.5
        for dim in (2, 3):
            assert abs(drawn.mean(dim).std() / (variance / SIZES[dim]) ** 0.5 - 1) < 0.1


def test_neighbours_and_seeds_are_independent() -> None:
    first, other = (kept(0.5, seed).double() - 0.5 for seed in (5, 6))
    pairs = [(first, other)]
    pairs += [(first.narrow(dim, 1, size - 1), first.narrow(dim, 0, size - 1)) for dim, size in enumerate(SIZES)]
    for one, next_one in pairs:
        assert abs((one * next_one).mean()) * 4 < 5 / one.numel() ** 0.5


def test_the_seed_says_all() -> None:
    assert torch.equal(kept(0.1, -9), kept(0.1, -9))


def flex_by_formula(q: Any, k: Any, v: Any, mods: Mods, mask: Any, scale: float, need_lse: bool) -> Any:
    """What a kernel of flex computes, by its functions, on all pairs."""
    index = [torch.arange(size).reshape(-1, *[1] * (3 - dim)) for dim, size in enumerate((*q.shape[:3], k.shape[2]))]
    scores = q @ k.transpose(2, 3) * scale
    scores = scores if mods.score_mod is None else mods.score_mod(scores, *index)
    scores = scores.masked_fill(~mods.mask_mod(*index), -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    return weights @ v, SimpleNamespace(lse=lse)


def test_kept_weights_are_those_of_the_whole_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row without keys has none; outputs and gradients in float64, of which a kernel of flex is only a formula."""
    seed, dropout, pattern = torch.tensor(7, dtype=torch.int32), 0.4, Band(9, 3)
    monkeypatch.setattr(flex, "run", flex_by_formula)
    monkeypatch.setattr(flex, "draw_seed", lambda device: seed)
    q, k, v, grad = torch.randn(4, 2, 3, 50, 16, dtype=torch.float64).unbind()
    key_mask = torch.arange(50).expand(2, -1) >= torch.tensor([[0], [20]])
    leaves = [each.requires_grad_() for each in (q, k, v)]
    call = AttentionCall(Layout(pattern, 3, 50, 50), inputs_of(q, k, v), TokenMask(key_mask), dropout=dropout)
    mods = mods_of(call, q.device)
    out, lse = flex._dropped(q, k, v, call, mods, None)
    index = [torch.arange(size).reshape(-1, *[1] * (3 - dim)) for dim, size in enumerate((2, 3, 50, 50))]
    allowed = pattern.allowed(*index[2:]) & key_mask[:, None, None] & key_mask[:, None, :, None]
    scores = (q @ k.transpose(2, 3) * call.scale).masked_fill(~allowed, -1e300)
    weights = torch.softmax(scores, -1).masked_fill(~allowed, 0)
    expected = (weights * Dropout(dropout, seed).is_kept(*index) / (1 - dropout)) @ v
    torch.testing.assert_close(out, expected)
    assert lse[1, :, :20].isneginf().all()
    for found, correct in zip(*(torch.autograd.grad(each, leaves, grad) for each in (out, expected)), strict=True):
        torch.testing.assert_close(found, correct)
