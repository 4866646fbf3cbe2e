"""Block top-k as a pattern: how many pairs it has, and what it refuses since they depend on queries and keys."""

from collections.abc import Callable

import pytest

from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.patterns import Band, BlockTopK, Causal, PerHead, parse_pattern


@pytest.mark.parametrize("pattern", [BlockTopK(4, 3), BlockTopK(5, 1), BlockTopK(1, 2)])
def test_pairs(pattern: BlockTopK) -> None:
    for first in range(0, 23, 2):
        for count in range(1, 25):
            rows = [pattern.num_keys_of(query, 48) for query in range(first, first + count)]
            assert pattern.num_pairs(count, 48, first) == sum(rows)


def test_short_texts_are_causal() -> None:
    pattern = BlockTopK(8, 3)
    assert pattern.reads_all_up_to() == 24
    assert pattern.num_pairs(24, 24) == Causal().num_pairs(24, 24)
    assert pattern.num_pairs(25, 25) == Causal().num_pairs(25, 25) - 8


@pytest.mark.parametrize(
    "ask",
    [
        lambda pattern: pattern.draw(8),
        lambda pattern: pattern.allowed(3, 1),
        lambda pattern: pattern.key_intervals(0, 3, 8),
        lambda pattern: pattern.full_key_intervals(0, 0, 8),
    ],
)
def test_nothing_is_said_without_content(ask: Callable[[BlockTopK], object]) -> None:
    with pytest.raises(ConfigurationError, match="chooses keys by their content, so that nothing but"):
        ask(BlockTopK(2, 2))


@pytest.mark.parametrize(
    "join",
    [
        lambda pattern: pattern | Band(1, 0),
        lambda pattern: Causal() & pattern,
        lambda pattern: ~pattern,
        lambda pattern: PerHead([pattern, Causal()]),
        lambda pattern: parse_pattern("blocks(block_top_k(2, 2), 4)"),
    ],
)
def test_it_is_no_part_of_another(join: Callable[[BlockTopK], object]) -> None:
    with pytest.raises(ConfigurationError, match=r"BlockTopK\(.*stands for a whole layer"):
        join(BlockTopK(2, 2))


@pytest.mark.parametrize(("block_tokens", "num_chosen"), [(0, 3), (4, 0), (4, 2.0), (True, 3)])
def test_wrong_numbers(block_tokens: int, num_chosen: int) -> None:
    with pytest.raises(ConfigurationError, match="must be an integer of at least 1"):
        BlockTopK(block_tokens, num_chosen)
