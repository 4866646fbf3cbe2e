"""Global tokens: pair counts with a band, lengths, and values they cannot have."""

from collections.abc import Callable, Iterator
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.patterns import Band, Blocks, GlobalTokens, KeyTable, Pattern, Union
from hf_efficient_attn.patterns.serialization import MAX_LISTED


@given(st.integers(2, 60), st.integers(0, 70), st.sets(st.integers(0, 59), max_size=6))
def test_pairs_of_band_and_globals(tokens: int, width: int, positions: set[int]) -> None:
    chosen = {position for position in positions if position < tokens}
    degrees = sum(min(tokens - 1, p + width) - max(0, p - width) + 1 for p in chosen)
    inner = sum(abs(p - q) <= width for p in chosen for q in chosen)
    band = Band(width, width).num_pairs(tokens, tokens)
    expected = 2 * tokens * len(chosen) - len(chosen) ** 2 + band - 2 * degrees + inner
    pattern = (Band(width, width) | GlobalTokens(positions)).resolve(tokens)
    assert pattern.num_pairs(tokens, tokens) == expected


def test_positions_meet_the_length() -> None:
    assert GlobalTokens([3, -1, 0, 0]) == GlobalTokens((-1, 0, 3))
    assert GlobalTokens([0, -1]).resolve(8) == GlobalTokens([0, 7])
    assert GlobalTokens([0, -9, 9]).resolve(8) == GlobalTokens([0])
    assert Blocks(GlobalTokens([0, -1]), 4).resolve(9) == Blocks(GlobalTokens([0, 2]), 4)


def test_causality() -> None:
    assert GlobalTokens([0], attends_to_all=False).is_causal
    assert not GlobalTokens([1], attends_to_all=False).is_causal
    assert not GlobalTokens([0]).is_causal
    assert GlobalTokens([0]).causal().is_causal


def test_token_orders_are_columns_and_rows() -> None:
    columns, rows = GlobalTokens([0, 5]).token_orders(num_queries=4, num_keys=8, query_offset=4)
    assert (columns.queries, columns.keys, columns.local) == (range(4, 8), (0, 5), None)
    assert (rows.queries, rows.keys, rows.local) == ((5,), range(8), None)
    (columns,) = Blocks(GlobalTokens([1], attends_to_all=False), 4).token_orders(num_queries=8, num_keys=7)
    assert (columns.queries, columns.keys) == (range(8), (4, 5, 6))


LISTED: dict[str, Callable[[Iterator[int]], Pattern]] = {
    "positions": GlobalTokens,
    "rows": lambda endless: KeyTable((number,) for number in endless),  # type: ignore[arg-type]
    "row": lambda endless: KeyTable([endless]),  # type: ignore[list-item]
    "patterns": lambda endless: Union(Band(number, 0) for number in endless),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("make", LISTED.values(), ids=LISTED)
def test_lists_are_read_up_to_their_bound(make: Callable[[Iterator[int]], Pattern]) -> None:
    endless = count()
    with pytest.raises(ConfigurationError, match=r"at most \d+ (positions|rows)|a list of 1 to"):
        make(endless)
    assert next(endless) <= MAX_LISTED + 1
