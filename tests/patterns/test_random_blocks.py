"""Random blocks: drawn once and for all, from the right candidates, and touching no global generator."""

import random
from typing import Any

import pytest

from hf_efficient_attn.patterns import Band, Blocks, Full, GlobalTokens, Pattern, RandomBlocks, big_bird, bigbird


def drawn_rows(pattern: Pattern, num_keys: int, layer: int = 0, head: int = 0) -> tuple[tuple[int, ...], ...]:
    (table,) = pattern.resolve(num_keys, layer, head).parts
    return table.rows  # type: ignore[attr-defined, no-any-return]


def test_draw_is_a_function_of_its_arguments() -> None:
    pattern = RandomBlocks(3, 4, seed=1)
    state = random.getstate()
    rows = drawn_rows(pattern, 80)
    assert random.getstate() == state
    assert rows == drawn_rows(RandomBlocks(3, 4, seed=1), 77)
    assert all(len(set(row)) == 3 and max(row) < 20 for row in rows)
    others = [drawn_rows(pattern, 80, layer=1), drawn_rows(pattern, 80, head=1), drawn_rows(RandomBlocks(3, 4), 80)]
    assert rows not in others


def test_draw_never_changes() -> None:
    """Checkpoints depend on it; a failure here means that every stored model would read other blocks."""
    assert drawn_rows(RandomBlocks(2, 4), 24) == ((0, 3), (2, 4), (0, 1), (0, 2), (2, 4), (3, 4))


def test_causal_draw_does_not_depend_on_the_length() -> None:
    pattern = RandomBlocks(2, 4, exclude=Blocks(Band(1, 0), 4), is_causal=True)
    long = drawn_rows(pattern, 400)
    assert pattern.is_causal
    assert pattern.resolve(400).is_causal
    assert [row for row in long[:4] if row] == [(0,), long[3]]
    for num_keys in (1, 9, 200, 399):
        rows = drawn_rows(pattern, num_keys)
        assert rows == long[: len(rows)]


def test_excluded_blocks_are_no_candidates() -> None:
    rest = Blocks(Band(1, 1) | GlobalTokens([0, -1]), 4)
    rows = drawn_rows(RandomBlocks(3, 4, exclude=rest), 40)
    assert rows[0] == rows[9] == ()
    assert all(not {0, row - 1, row, row + 1, 9} & set(rows[row]) for row in range(1, 9))
    assert all(len(rows[row]) == 3 for row in range(1, 9))
    assert drawn_rows(RandomBlocks(30, 4), 40)[5] == tuple(range(10))


def test_draws_are_even() -> None:
    rows = [row for head in range(40) for row in drawn_rows(RandomBlocks(1, 1), 50, head=head)]
    counts = [sum(row == (block,) for row in rows) for block in range(50)]
    # 2,000 draws among 50: 40 each, with a standard deviation of 6.3
    assert 15 < min(counts) < max(counts) < 65


def test_only_random_patterns_differ_by_layer() -> None:
    assert (Band(1, 1) | RandomBlocks(1, 4)).causal().is_random
    assert bigbird(plan="authors").is_random
    assert not (Band(1, 1) | Full()).is_random


def test_a_longer_text_draws_only_its_new_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in decoding, one block after the other; also where what is excluded is drawn itself."""
    pattern = RandomBlocks(2, 4, seed=77, exclude=RandomBlocks(1, 4, seed=78, is_causal=True), is_causal=True)
    drawn, draw = [], big_bird._row

    def counted(*arguments: Any) -> Any:
        drawn.append(arguments[2])
        return draw(*arguments)

    monkeypatch.setattr(big_bird, "_row", counted)
    tables = [pattern.resolve(tokens) for tokens in (40, 41, 44, 20, 48)]
    # its own rows, and those of what it excludes
    assert sorted(drawn) == sorted([*range(10), 10, 11] * 2)
    big_bird._causal_rows.cache_clear()
    big_bird._draw_random_blocks.cache_clear()
    assert [pattern.resolve(tokens) for tokens in (40, 41, 44, 20, 48)] == tables
    assert drawn_rows(pattern, 48)[:10] == drawn_rows(pattern, 40)
