"""The interleaved span tree: every pair and label against the tree whose nodes lie level by level, and its counts."""

import pytest
import torch
from patterns.relation import keys_of
from torch import Tensor

from hf_efficient_attn.layout.score_terms import InterleavedRelation
from hf_efficient_attn.patterns import InterleavedSpanTree, SizedSpanTree

CLIP = 3


def node_of(level: int, index: int, num_tokens: int) -> int:
    """Return where a node of the tree lies, or the largest smaller one with the same tokens if it lies beyond."""
    while (node := (2 * index + 1) * 2**level - 1) >= 2 * num_tokens:
        level, index = level - 1, 2 * index
    return node


def levelled(num_tokens: int, k: int, left_only: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return (pairs, labels of what tokens read, nodes of the tree), of a `SizedSpanTree` moved to these places."""
    tree = SizedSpanTree(num_tokens, k, left_only)
    nodes = torch.tensor(
        [node_of(level, i, num_tokens) for level, (_, size) in enumerate(tree._levels) for i in range(size)]
    )
    index = torch.arange(len(nodes))
    listed = tree.allowed(index[:, None], index).nonzero()
    queries, keys = nodes[listed].unbind(1)
    pairs = torch.zeros(2 * num_tokens, 2 * num_tokens, dtype=torch.bool)
    labels = torch.full(pairs.shape, -1)
    pairs[queries, keys] = True
    of_tokens = listed[:, 0] < num_tokens
    labels[queries[of_tokens], keys[of_tokens]] = tree.relation_label(*listed[of_tokens].unbind(1), CLIP)
    # no token reads two nodes that lie in one place
    assert (labels >= 0).sum() == of_tokens.sum()
    return pairs, labels, nodes


@pytest.mark.parametrize("left_only", [False, True])
@pytest.mark.parametrize("k", [1, 2, 3, 7])
def test_pairs_and_labels_are_those_of_the_tree(k: int, left_only: bool) -> None:
    for num_tokens in (*range(1, 13), 21, 32, 33):
        check_tree(num_tokens, k, left_only)


def check_tree(num_tokens: int, k: int, left_only: bool) -> None:
    expected, labels, nodes = levelled(num_tokens, k, left_only)
    pattern = InterleavedSpanTree(k, left_only).resolve(2 * num_tokens)
    index = torch.arange(2 * num_tokens)
    allowed = pattern.allowed(index[:, None], index)
    # a text of one token, or of a power of two, has a second root, which no token reads
    assert len(index) - len(nodes.unique()) == (num_tokens & (num_tokens - 1) == 0)
    assert torch.equal(allowed[nodes], expected[nodes])
    assert not allowed[::2][:, [each for each in index.tolist() if each not in nodes]].any()
    found = InterleavedRelation(k, CLIP, left_only).of(index[:, None], index)
    assert torch.equal(torch.where(labels >= 0, found, -1), labels)
    rows = [set(row.nonzero().flatten().tolist()) for row in allowed]
    for first in range(len(rows)):
        assert keys_of(pattern.key_intervals(first, first, len(rows))) == rows[first]
        for last in range(first, len(rows), 5):
            assert keys_of(pattern.key_intervals(first, last, len(rows))) == set.union(*rows[first : last + 1])
    assert pattern.num_pairs(len(rows), len(rows)) == int(allowed.sum())


def test_a_text_that_goes_on_changes_nothing_before() -> None:
    """What tokens read to the left, and in which spans, does not depend on the end."""
    pattern, index = InterleavedSpanTree(2, left_only=True), torch.arange(90)
    allowed = pattern.allowed(index[:, None], index)
    complete = [node for node in range(40) if node % 2 == 0 or max(allowed[node].nonzero().flatten().tolist()) < 40]
    shorter = pattern.allowed(index[:40, None], index[:40])
    assert torch.equal(allowed[complete][:, :40], shorter[complete])
    # and tokens read complete spans only
    for token in range(20):
        spans = [key for key in allowed[2 * token].nonzero().flatten().tolist() if key % 2]
        assert all(allowed[span].nonzero().max() < 2 * token for span in spans)


def context_pairs(num_tokens: int, k: int, left_only: bool = True) -> int:
    pattern = InterleavedSpanTree(k, left_only).resolve(2 * num_tokens)
    return sum(pattern.num_keys_of(node, 2 * num_tokens) - 1 for node in range(0, 2 * num_tokens, 2))


def test_counts_are_the_paper_s() -> None:
    for power in range(1, 9):
        tokens = 2**power
        assert context_pairs(tokens, 1) == tokens * (power - 1) + 1
        assert context_pairs(tokens, 2) == tokens * (2 * power - 4.5) + 2 * power + 4
        assert context_pairs(tokens, 2, left_only=False) == 2 * context_pairs(tokens, 2)
    assert context_pairs(512, 64) == 67_896
    assert context_pairs(8192, 4) == 315_549


def test_fitting_lengths() -> None:
    assert [InterleavedSpanTree(2).fitting_length(length) for length in (1, 2, 7)] == [2, 2, 6]
