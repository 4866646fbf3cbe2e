"""Block top-k as a pattern: how many pairs it has, and what it refuses since they depend on queries and keys."""

import pytest

from hf_efficient_attn.patterns import BlockTopK, Causal


@pytest.mark.parametrize("pattern", [BlockTopK(4, 3), BlockTopK(5, 1), BlockTopK(1, 2)])
def test_pairs(pattern: BlockTopK) -> None:
    for first in range(0, 23, 2):
        for count in range(1, 25):
            rows = [pattern.num_keys_of(query, 48) for query in range(first, first + count)]
            assert pattern.num_pairs(count, 48, first) == sum(rows)


def test_short_texts_are_causal() -> None:
    pattern = BlockTopK(8, 3)
    assert pattern.attends_to_all_up_to() == 24
    assert pattern.num_pairs(24, 24) == Causal().num_pairs(24, 24)
    assert pattern.num_pairs(25, 25) == Causal().num_pairs(25, 25) - 8
