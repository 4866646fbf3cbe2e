"""Blocks of tokens: closed-form counts of pairs and blocks, orders, tables, and values they cannot have."""

import json

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_efficient_attn.patterns import Band, BlockLocal, Blocks, Causal, Dilated, GlobalTokens, KeyTable, Pattern
from hf_efficient_attn.patterns.intervals import size

lengths, block_lengths, widths = st.integers(1, 120), st.integers(1, 16), st.integers(0, 150)


@given(lengths, block_lengths)
def test_pairs_of_local_blocks(tokens: int, block: int) -> None:
    whole, rest = divmod(tokens, block)
    assert BlockLocal(block).num_pairs(tokens, tokens) == whole * block**2 + rest**2
    causal = BlockLocal(block).causal()
    assert causal.num_pairs(tokens, tokens) == (whole * block * (block + 1) + rest * (rest + 1)) // 2


def touched_and_full_blocks(pattern: Pattern, num_rows: int, block: int) -> tuple[int, int]:
    """Count blocks of a sequence of `num_rows` whole blocks by the intervals of each row of blocks."""
    touched = full = 0
    for row in range(num_rows):
        bounds = (row * block, (row + 1) * block - 1, num_rows * block)
        touched += sum(-(-stop // block) - start // block for start, stop in pattern.key_intervals(*bounds))
        full += sum(max(0, stop // block - -(-start // block)) for start, stop in pattern.full_key_intervals(*bounds))
    return touched, full


@given(st.integers(1, 12), block_lengths, widths)
def test_blocks_that_a_band_touches_and_fills(num_rows: int, block: int, width: int) -> None:
    reach = min((width + block - 1) // block, num_rows - 1)
    inside = min((width + 1) // block - 1, num_rows - 1)
    touched = num_rows * (2 * reach + 1) - reach * (reach + 1)
    full = 0 if inside < 0 else num_rows * (2 * inside + 1) - inside * (inside + 1)
    assert touched_and_full_blocks(Band(width, width), num_rows, block) == (touched, full)
    causal_touched = num_rows * (reach + 1) - reach * (reach + 1) // 2
    causal_full = sum(num_rows - distance for distance in range(1, inside + 1)) if block > 1 else causal_touched
    assert touched_and_full_blocks(Band(width, 0), num_rows, block) == (causal_touched, causal_full)


@given(st.integers(1, 8), block_lengths, st.integers(0, 8), st.integers(1, 40))
def test_blocks_that_dilation_touches(num_rows: int, block: int, width: int, step: int) -> None:
    distances = [step * i for i in range(-width, width + 1)]
    expected = {
        (row, column)
        for row in range(num_rows)
        for column in range(num_rows)
        if any(abs((column - row) * block - distance) < block for distance in distances)
    }
    pattern = Dilated(width * step, width * step, step)
    found = set()
    for row in range(num_rows):
        for start, stop in pattern.key_intervals(row * block, (row + 1) * block - 1, num_rows * block):
            found |= {(row, column) for column in range(start // block, -(-stop // block))}
    assert found == expected


def test_token_orders_begin_within_a_block() -> None:
    even, odd = Blocks(Dilated(2, 2, 2), 4).token_orders(num_queries=9, num_keys=15, query_offset=6)
    assert (odd.queries, odd.keys) == ((6, 7, 12, 13, 14), (4, 5, 6, 7, 12, 13, 14))
    assert (odd.local, odd.local_query_offset) == (Blocks(Band(1, 1), 4), 2)
    assert (even.queries, even.local_query_offset) == ((8, 9, 10, 11), 4)
    (natural,) = Blocks(Band(1, 1), 4).token_orders(num_queries=9, num_keys=15, query_offset=6)
    assert natural == Pattern.token_orders(Blocks(Band(1, 1), 4), 9, 15, 6)[0]


def test_causality_counts_whole_blocks() -> None:
    assert Blocks(Band(2, -1), 4).is_causal
    assert not Blocks(Causal(), 4).is_causal
    assert Blocks(Causal(), 1).is_causal
    assert Blocks(KeyTable([[], [0], [0, 1]]), 4).is_causal


def test_tables() -> None:
    table = KeyTable([[2, 0, 2], [], [1]])
    assert table == KeyTable(((0, 2), (), (1,)))
    assert size(table.key_intervals(0, 2, 3)) == 3
    assert not table.allowed(7, 0)
    converted = table.with_tables(list)
    assert converted == table
    assert converted.allowed(2, 1)
    nested = (Blocks(table, 2) | Band(1, 1)).with_tables(list)
    assert nested.patterns[0].pattern._lookup.keys[:3] == [0, 2, 1]
    assert KeyTable([[0], []]).table_sizes == KeyTable([[], [5]]).table_sizes != KeyTable([[0, 1], []]).table_sizes


@pytest.mark.parametrize(
    "rows",
    [
        numpy.array([[2, 0], [1, 1]]),
        torch.tensor([[2, 0], [1, 1]], dtype=torch.int32),
        [numpy.array([2, 0]), torch.tensor([1])],
        [(numpy.int64(2), 0), [torch.tensor(1)]],
    ],
)
def test_arrays_of_integers_become_integers(rows: object) -> None:
    table, same = KeyTable(rows), KeyTable([[0, 2], [1]])
    assert table == same
    assert json.dumps(table.to_dict()) == json.dumps(same.to_dict())
    assert repr(table) == repr(same)
    assert all(type(key) is int for row in table.rows for key in row)
    for positions in (numpy.array([3, 0]), torch.tensor([3, 0]), [numpy.int8(3), 0]):
        assert repr(GlobalTokens(positions)) == repr(GlobalTokens([3, 0]))


def test_a_ragged_table_takes_no_more_than_its_keys() -> None:
    num_keys = 20_000
    table = KeyTable([range(num_keys), *([1] for _ in range(num_keys))])
    assert sum(table.table_sizes) <= 6 * num_keys
    assert [table.allowed(0, key) for key in (0, 7_777, num_keys - 1, num_keys)] == [True, True, True, False]
    assert [table.allowed(num_keys, key) for key in (0, 1, 2)] == [False, True, False]
    assert table.num_pairs(num_keys + 5, num_keys) == 2 * num_keys
