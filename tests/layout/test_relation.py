"""Many pairs looked at together are allowed as each by itself is."""

from unittest.mock import patch

import torch
from hypothesis import given
from hypothesis import strategies as st
from patterns.strategies import compositions

from hf_efficient_attn.layout import dense_mask as relation_module
from hf_efficient_attn.layout.dense_mask import relation
from hf_efficient_attn.patterns import Blocks, KeyTable, Pattern, SizedSpanTree, Union

TOKENS = 14
positions = st.lists(st.integers(0, TOKENS - 1), min_size=1, max_size=4)
# a part that occurs twice, in blocks as well, and one whose rows are longer than there are keys to look at
NESTED = ~(KeyTable([range(0, 400, 2), [1, 2, 5]]) & ~SizedSpanTree(7, 2))
patterns = st.one_of(
    compositions.map(lambda pattern: pattern.resolve(TOKENS)),
    st.sampled_from([NESTED | ~NESTED, Union([Blocks(NESTED, 2), SizedSpanTree(7, 1, builder="release")]) & ~NESTED]),
)


@given(patterns, positions, positions)
def test_as_each_pair_by_itself(pattern: Pattern, queries: list[int], keys: list[int]) -> None:
    """Keys in their order, and in any, as those of several documents are."""
    for order in (sorted(keys), keys):
        found = relation(
            pattern.with_tables(torch.tensor), torch.tensor(queries)[None, :, None], torch.tensor(order)[None, None]
        )
        assert found.tolist() == [[[bool(pattern.allowed(query, key)) for key in order] for query in queries]]


@given(patterns, st.integers(0, 3), st.integers(4, 10))
def test_copies_of_rows(pattern: Pattern, first: int, count: int) -> None:
    queries, keys = torch.arange(first, first + count)[None, :, None], torch.arange(TOKENS)[None, None]
    with patch.object(relation_module, "MIN_COPIED_PAIRS", 1):
        found = relation(pattern.with_tables(torch.tensor), queries, keys)
    assert torch.equal(found, pattern.allowed(queries, keys).expand(found.shape))


@given(patterns, st.integers(0, TOKENS - 1))
def test_row_intervals_of_integers(pattern: Pattern, query: int) -> None:
    for part in (pattern, *pattern.atoms()):
        intervals = part.row_intervals(query, 10**6)
        if intervals is not None:
            read = {key for start, stop in intervals for key in range(start, stop) if key < TOKENS}
            assert read == {key for key in range(TOKENS) if part.allowed(query, key)}
