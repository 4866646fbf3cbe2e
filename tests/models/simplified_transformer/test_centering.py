"""The running mean against its definition, pair by pair, for random lengths, masks, documents and cache splits."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models.simplified_transformer.dense_reference import allowed_pairs, centring_matrix

from hf_efficient_attn.models.simplified_transformer.centering import build_centering, prefix_sum

lengths = st.integers(1, 40)
seeds = st.integers(0, 2**16)


def values(rows: int, tokens: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, tokens, 6, generator=torch.Generator().manual_seed(seed))


@given(tokens=st.integers(1, 600), seed=seeds)
@settings(deadline=None)
def test_prefix_sum(tokens: int, seed: int) -> None:
    x = values(2, tokens, seed).double()
    torch.testing.assert_close(prefix_sum(x), x.cumsum(1))


@given(tokens=lengths, seed=seeds, is_causal=st.booleans(), kind=st.sampled_from(["none", "padding", "documents"]))
@settings(deadline=None, max_examples=150)
def test_mean_over_allowed_keys(tokens: int, seed: int, is_causal: bool, kind: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = values(2, tokens, seed)
    padding = (torch.rand(2, tokens, generator=generator) < 0.7).long() if kind == "padding" else None
    documents = torch.randint(0, 2, (2, tokens), generator=generator).cumsum(1) if kind == "documents" else None
    expected = centring_matrix(allowed_pairs(tokens, is_causal, padding, documents)) @ x.double()
    actual = build_centering(tokens, 0, padding, documents, is_causal, x.device).mean(x)
    torch.testing.assert_close(actual.double().expand_as(x), expected, atol=1e-5, rtol=1e-5)


@given(tokens=st.integers(2, 40), split=st.floats(0, 1), seed=seeds, padded=st.booleans())
@settings(deadline=None)
def test_split_at_a_cache(tokens: int, split: float, seed: int, padded: bool) -> None:
    past = min(int(split * tokens), tokens - 1)
    x = values(2, tokens, seed)
    padding = torch.ones(2, tokens, dtype=torch.long)
    if padded:
        padding[0, : tokens // 2] = 0
    whole = build_centering(tokens, 0, padding, None, True, x.device).mean(x)
    part = build_centering(tokens - past, past, padding, None, True, x.device)
    continued = part.mean(x[:, past:], part.sum_past(x[:, :past]))
    torch.testing.assert_close(continued, whole[:, past:], atol=1e-5, rtol=1e-5)


def test_values_of_padding_never_enter() -> None:
    x = values(1, 6, 0)
    x[0, :2] = torch.nan
    mask = torch.tensor([[0, 0, 1, 1, 1, 1]])
    for is_causal in (True, False):
        mean = build_centering(6, 0, mask, None, is_causal, x.device).mean(x)
        assert torch.isfinite(mean).all()


def test_document_sums_stay_exact_far_from_the_start() -> None:
    """A difference of float32 prefix sums would lose three digits here."""
    x = values(1, 8192, 0) + 5
    documents = torch.arange(8192)[None] // 7
    mean = build_centering(8192, 0, None, documents, True, x.device).mean(x)
    last = x[0, 8190:].double()
    torch.testing.assert_close(mean[0, 8190:].double(), torch.stack([last[0], last.mean(0)]), atol=1e-6, rtol=1e-6)


def test_autocast_does_not_round_the_sums() -> None:
    x = values(1, 2000, 0) + 5
    expected = x.double().cumsum(1) / torch.arange(1, 2001).view(1, -1, 1)
    with torch.autocast("cpu", torch.bfloat16):
        mean = build_centering(2000, 0, None, None, True, x.device).mean(x)
    torch.testing.assert_close(mean.double(), expected, atol=1e-5, rtol=1e-6)
