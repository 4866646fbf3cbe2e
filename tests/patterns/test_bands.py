"""Distances: the closed-form pair counts of the literature, causal forms, and values no pattern can have."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_efficient_attn.patterns import Band, Causal, Dilated, Full, Pattern, Strided

lengths, widths, steps = st.integers(1, 200), st.integers(0, 250), st.integers(1, 12)


@given(lengths, widths, steps)
def test_pair_counts(tokens: int, width: int, step: int) -> None:
    """A query reads `width` multiples of `step` to each side, or to the left only."""
    reach = min(width, (tokens - 1) // step)
    both = tokens * (2 * reach + 1) - step * reach * (reach + 1)
    left = tokens * (reach + 1) - step * reach * (reach + 1) // 2
    pattern = Dilated(width * step, width * step, step)
    assert pattern.num_pairs(tokens, tokens) == both
    assert pattern.causal().num_pairs(tokens, tokens) == left
    if step == 1:
        assert Band(width, width).num_pairs(tokens, tokens) == both
        assert Band(width, width).causal().num_pairs(tokens, tokens) == left


def test_full_and_causal_counts() -> None:
    assert Full().num_pairs(7, 7) == 49
    assert Causal().num_pairs(7, 7) == 28
    assert Strided(3).num_pairs(7, 7) == 9 + 4 + 4


@pytest.mark.parametrize(
    ("pattern", "causal"),
    [
        (Full(), Causal()),
        (Causal(), Causal()),
        (Band(3, 2), Band(3, 0)),
        (Band(3, None), Band(3, 0)),
        (Band(3, -1), Band(3, -1)),
        (Dilated(4, 4, 2), Dilated(4, 0, 2)),
        (Strided(2), Dilated(None, 0, 2)),
    ],
)
def test_causal_forms(pattern: Pattern, causal: Pattern) -> None:
    assert pattern.causal() == causal
    assert causal.is_causal


def test_token_orders_are_bands_of_residue_classes() -> None:
    first, second = Dilated(9, 6, 2).token_orders(num_queries=4, num_keys=9, query_offset=5)
    assert (first.queries, first.keys) == (range(6, 9, 2), range(0, 9, 2))
    assert (second.queries, second.keys) == (range(5, 9, 2), range(1, 9, 2))
    assert first.local == second.local == Band(4, 3)
    assert (first.local_query_offset, second.local_query_offset) == (3, 2)
    assert Strided(3).token_orders(6, 6)[0].local == Full()
    assert len(Dilated(4, 4, 4).token_orders(num_queries=2, num_keys=8)) == 2
    assert (Dilated(8, 8, 2) & Causal()).token_orders(4, 4)[0].local == Band(4, 4) & Causal()
