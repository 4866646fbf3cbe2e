"""Grids: what they read in words of their own, closed forms of their pairs, their tiles, and what they refuse."""

from collections.abc import Iterator
from math import prod
from typing import Any

import pytest
from fuzz_formula import Head, readable
from hypothesis import given, settings
from hypothesis import strategies as st
from patterns.relation import Pairs, keys_of, pairs_of

from hf_efficient_attn.errors import InputError
from hf_efficient_attn.patterns import (
    Band,
    Causal,
    Dilated,
    Full,
    GlobalTokens,
    Grid,
    Pattern,
    PerHead,
    RandomBlocks,
    SizedGrid,
)
from hf_efficient_attn.patterns.pattern import TokenOrder

BAND = Band(3, 3)
NEAR = Band(1, 1)
axes = st.one_of(
    st.builds(Band, st.none() | st.integers(-1, 4), st.none() | st.integers(-1, 4)),
    st.builds(Dilated, st.integers(0, 6), st.integers(0, 6), st.integers(1, 3)),
    st.sampled_from([Full(), Causal(), GlobalTokens([0, 2]), NEAR | GlobalTokens([1])]),
)
shiftable = st.one_of(
    st.builds(Band, st.integers(0, 4), st.integers(0, 4)),
    st.builds(Dilated, st.integers(0, 6), st.integers(0, 6), st.integers(1, 3)),
    st.just(Full()),
)


@st.composite
def grids(draw: st.DrawFn) -> SizedGrid:
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3).filter(lambda shape: prod(shape) <= 40))
    borders = draw(st.sampled_from(["cut", "shifted"]))
    listed = [draw(shiftable if borders == "shifted" else axes) for _ in shape]
    return SizedGrid(shape, listed, draw(st.integers(0, 3)), borders, draw(st.booleans()))


def described(grid: SizedGrid) -> Pairs:
    """Return the pairs of a grid by its description, of which `fuzz_grids.py` is one more reading."""
    return {(query, key) for query, key in readable(grid, grid.num_tokens, Head(0, 0, 1)).nonzero().tolist()}


@settings(max_examples=40)
@given(grids(), st.data())
def test_it_reads_what_it_says(grid: SizedGrid, data: st.DataObject) -> None:
    pairs, size = described(grid), grid.num_tokens
    assert pairs_of(grid, size, size) == pairs
    first = data.draw(st.integers(0, size - 1))
    last = data.draw(st.integers(first, size - 1))
    rows = [{key for query, key in pairs if query == each} for each in range(first, last + 1)]
    read = keys_of(grid.key_intervals(first, last, size))
    assert read >= set.union(*rows)
    assert read == set.union(*rows) or grid.is_causal or any(axis.parts for axis in grid.axes)
    assert keys_of(grid.full_key_intervals(first, last, size)) <= set.intersection(*rows)
    assert keys_of(grid.key_intervals(first, first, size)) == rows[0]
    assert grid.num_pairs(last - first + 1, size, first) == sum(map(len, rows))
    ahead = grid.max_tokens_ahead
    assert ahead is None or all(key - query <= ahead for query, key in pairs)


@settings(max_examples=40)
@given(grids())
def test_tiles_hold_every_pair(grid: SizedGrid) -> None:
    size = grid.num_tokens
    orders = grid.token_orders(size, size)
    covered = {pair for order in orders for pair in pairs_of_order(order)}
    assert covered >= pairs_of(grid, size, size)
    assert sorted(query for order in orders for query in order.queries) == list(range(size))


def pairs_of_order(order: TokenOrder) -> Iterator[tuple[int, int]]:
    for place, query in enumerate(order.queries):
        row = place + order.local_query_offset
        keys = range(len(order.keys))
        if order.local is not None:
            keys_here = keys_of(order.local.key_intervals(row, row, len(order.keys)))
            assert keys_here == {key for key in keys if order.local.allowed(row, key)}
        for key in keys if order.local is None else sorted(keys_here):
            yield query, order.keys[key]


@pytest.mark.parametrize("axis", [BAND, Dilated(6, 6, 2)], ids=str)
def test_a_neighbourhood_is_read_in_few_keys(axis: Pattern) -> None:
    """Tiles of a picture read about as many keys each, however many tokens lie between its rows."""
    for side in (56, 112):
        grid = Grid([side, side], [axis, axis], 1).resolve(side * side + 1)
        _, *orders = grid.token_orders(side * side + 1, side * side + 1)
        assert len(orders) == 1
        rows = range(0, side * side, orders[0].local.granularity)
        read = {len(keys_of(orders[0].local.key_intervals(row, row, side * side + 1))) for row in rows}
        assert len(read) == 1
        assert read.pop() <= 13**2 + 1


@pytest.mark.parametrize(("height", "width", "prefix"), [(56, 56, 1), (32, 20, 5), (2, 3, 0)])
def test_closed_forms(height: int, width: int, prefix: int) -> None:
    """Products of those of bands; shifted borders cut nothing; on one axis a row and a column are read whole."""
    size = height * width + prefix
    of_prefix = prefix * size + (size - prefix) * prefix

    def pairs(*listed: Pattern, **options: Any) -> int:
        return Grid([height, width], listed, prefix, **options).resolve(size).num_pairs(size, size) - of_prefix

    def band(length: int) -> int:
        width = min(3, length - 1)
        return length * (2 * width + 1) - width * (width + 1)

    assert pairs(BAND, BAND) == band(height) * band(width)
    assert pairs(BAND, BAND, borders="shifted") == height * min(7, height) * width * min(7, width)
    assert pairs(Full(), Band(0, 0)) == height**2 * width
    assert pairs(Band(0, 0), Full()) == height * width**2
    causal = Grid([height, width], [Full(), Full()], prefix).causal().resolve(size)
    assert causal.num_pairs(size, size) == size * (size + 1) // 2


def test_a_row_is_a_band() -> None:
    grid, band = Grid([12], [BAND]).resolve(12), Band(3, 3)
    assert pairs_of(grid, 12, 12) == pairs_of(band, 12, 12)


def test_the_first_axis_follows_the_length() -> None:
    video = Grid([None, 2, 3], [Band(1, 0), Full(), Full()], 1)
    for frames in (1, 4):
        assert video.resolve(1 + 6 * frames) == SizedGrid([frames, 2, 3], video.axes, 1)
    for tokens in (1, 8, 12):
        with pytest.raises(InputError, match="any number × 2 × 3 need 1 \\+ a multiple of 6"):
            video.resolve(tokens)


def test_a_causal_grid_may_end_early() -> None:
    grid = Grid([4, 5], [Band(2, 1), NEAR], 2)
    whole = pairs_of(grid.causal().resolve(22), 22, 22)
    assert whole == {(query, key) for query, key in pairs_of(grid.resolve(22), 22, 22) if key <= query}
    assert not grid.causal().depends_on_length
    for tokens in (1, 2, 9, 22):
        short = grid.causal().resolve(tokens)
        assert pairs_of(short, tokens, tokens) == {(query, key) for query, key in whole if query < tokens}
        assert pairs_of(grid.causal(), tokens, tokens) == pairs_of(short, tokens, tokens)
    rows = Grid([None, 5], [Band(2, 1), NEAR], 2, is_causal=True)
    assert pairs_of(rows.resolve(19), 19, 19) == {(query, key) for query, key in whole if query < 19}


def test_heads_may_differ_on_an_axis() -> None:
    grid = Grid([3, 4], [PerHead([Full(), NEAR]), NEAR], 0, "shifted")
    assert grid.heads(2) == tuple(Grid([3, 4], [axis, NEAR], 0, "shifted") for axis in (Full(), NEAR))
    drawn = [Grid([6, 6], [RandomBlocks(1, 1, 3), NEAR]).resolve(36, head=head, num_heads=2) for head in range(2)]
    assert drawn[0] != drawn[1]
