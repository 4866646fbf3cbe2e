"""The span tree: every edge and label against the builder's own loop, golden counts, and the fault of the release."""

import pytest
import torch
from patterns.relation import keys_of
from patterns.tree_by_pointers import build

from hf_efficient_attn.patterns import Pattern, SizedSpanTree, SpanTree, span_tree_nodes


def tree(num_tokens: int, k: int, is_causal: bool = False, builder: str = "fixed") -> SizedSpanTree:
    sized = SpanTree(k, is_causal, builder).resolve(span_tree_nodes(num_tokens))
    assert isinstance(sized, SizedSpanTree)
    assert sized.num_tokens == num_tokens
    return sized


@pytest.mark.parametrize("builder", ["fixed", "release"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("k", [1, 2, 3, 7])
def test_edges_and_labels(k: int, is_causal: bool, builder: str) -> None:
    for num_tokens in (*range(1, 12), 21, 32):
        check_edges(num_tokens, k, is_causal, builder)


def check_edges(num_tokens: int, k: int, is_causal: bool, builder: str) -> None:
    expected = build(num_tokens, k, is_causal, builder)
    pattern, num_nodes = tree(num_tokens, k, is_causal, builder), span_tree_nodes(num_tokens)
    queries, keys = torch.arange(num_nodes)[:, None], torch.arange(num_nodes)[None]
    labels = torch.full((num_nodes, num_nodes), -1)
    for (query, key), label in expected.items():
        labels[query, key] = label
    assert torch.equal(pattern.relation_label(queries, keys, clip_distance=99), labels)
    assert torch.equal(pattern.allowed(queries, keys), labels >= 0)
    assert pattern.allowed(0, 0) is True
    check_intervals(pattern, [set(row.nonzero().flatten().tolist()) for row in labels >= 0])


def check_intervals(pattern: Pattern, rows: list[set[int]]) -> None:
    for first in range(len(rows)):
        assert keys_of(pattern.full_key_intervals(first, first, len(rows))) == rows[first]
        for last in range(first, len(rows), 3):
            own = rows[first : last + 1]
            assert keys_of(pattern.key_intervals(first, last, len(rows))) == set.union(*own)
            assert keys_of(pattern.full_key_intervals(first, last, len(rows))) <= set.intersection(*own)


def context_pairs(num_tokens: int, k: int, is_causal: bool = True, builder: str = "fixed") -> int:
    pattern, num_nodes = tree(num_tokens, k, is_causal, builder), span_tree_nodes(num_tokens)
    return pattern.num_pairs(num_tokens, num_nodes) - num_tokens


@pytest.mark.parametrize(
    ("num_tokens", "pairs"),
    [(5, (8, 9, 10)), (8, (17, 22, 26)), (16, (49, 68, 89)), (64, (321, 496, 745)), (128, (769, 1234, 1941))],
)
def test_golden_counts(num_tokens: int, pairs: tuple[int, ...]) -> None:
    assert tuple(context_pairs(num_tokens, k) for k in (1, 2, 4)) == pairs
    if num_tokens != 5:
        assert tuple(context_pairs(num_tokens, k, is_causal=False) for k in (1, 2, 4)) == tuple(2 * n for n in pairs)


def test_closed_forms() -> None:
    for power in range(1, 9):
        tokens = 2**power
        assert context_pairs(tokens, 1) == tokens * (power - 1) + 1
        assert context_pairs(tokens, 2) == tokens * (2 * power - 4.5) + 2 * power + 4
    assert context_pairs(512, 64) == 67_896
    assert span_tree_nodes(100) == 202


@pytest.mark.parametrize(("builder", "doubly", "own"), [("fixed", 0, 0), ("release", 253, 3)])
def test_tokens_are_read_once(builder: str, doubly: int, own: int) -> None:
    """The fault of the release, as found in its code: 100 tokens, 4 nodes per side."""
    pattern, num_nodes = tree(100, 4, builder=builder), span_tree_nodes(100)
    members = [
        keys_of(pattern.key_intervals(node, node, num_nodes)) if node >= 100 else {node} for node in range(num_nodes)
    ]
    covers = []
    for query in range(100):
        keys = keys_of(pattern.key_intervals(query, query, num_nodes)) - {query}
        covers.append([token for key in keys for token in members[key]])
    assert sum(len(cover) - len(set(cover)) for cover in covers) == doubly
    assert sum(query in cover for query, cover in enumerate(covers)) == own


def test_labels_are_clipped() -> None:
    pattern = tree(64, 2)
    labels = {pattern.relation_label(query, key, clip_distance=2) for query in range(127) for key in range(127)}
    assert max(labels) == 5 * 3 - 1
    assert min(labels) == -1


def test_causal_form_is_not_causal_among_nodes() -> None:
    assert SpanTree(2).causal() == SpanTree(2, is_causal=True)
    assert tree(8, 2).causal() == tree(8, 2, is_causal=True)
    assert not tree(8, 2, is_causal=True).is_causal
