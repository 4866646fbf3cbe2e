"""Which tokens are in which cluster: ties, padding, documents, and what the future changes."""

from typing import Any

import pytest
import torch
from models.routing_transformer.tiny_models import build, tokens
from models_cases import TOLERANCE
from torch import Tensor

from hf_efficient_attn.integration.forward_context import CACHE_ARGUMENT
from hf_efficient_attn.models.routing_transformer.clusters import balanced_groups, block_groups, causal_groups


def read_by(groups: Any, head: int = 0) -> dict[int, list[int]]:
    """Return the keys in the groups of each query, causal and within the reach, for the first example."""
    read: dict[int, list[int]] = {}
    for queries, keys in zip(groups.queries[0, head].tolist(), groups.keys[0, head].tolist(), strict=True):
        for place, query in enumerate(queries):
            listed = [(place + groups.shift - each, key) for each, key in enumerate(keys) if 0 <= key <= query]
            if query >= 0:
                near = [key for distance, key in listed if groups.reach is None or distance <= groups.reach]
                read.setdefault(query, []).extend(near)
    return read


def one_text(length: int) -> Tensor:
    return torch.zeros(1, length, dtype=torch.long)


def test_ties_go_to_the_first_tokens() -> None:
    alike = torch.ones(1, 1, 6, 1)
    groups = balanced_groups(alike, alike, one_text(6), 6, 3, is_packed=False)
    assert groups.keys.tolist() == [[[[0, 1, 2]]]]
    documents = torch.tensor([[-1, 0, 0, 0, 0, -1]])
    assert balanced_groups(alike, alike, documents, 6, 3, is_packed=False).keys.tolist() == [[[[1, 2, 3]]]]


def test_what_differs_by_rounding_is_a_tie() -> None:
    """In rows and in packed documents, at the border of a cluster and in steps of a cache."""
    noise = 1e-6 * torch.rand(1, 1, 12, 1, generator=torch.Generator().manual_seed(0))
    similar = torch.tensor([1.0, 2.0, 1.0, 3.0, 1.0, 1.0] * 2).view(1, 1, 12, 1) + noise
    alone = balanced_groups(similar, similar, one_text(12), 12, 6, is_packed=False, width=1e-5)
    assert alone.keys.tolist() == [[[[0, 1, 2, 3, 7, 9]]]]
    step = balanced_groups(similar, similar, one_text(12), 1, 6, is_packed=False, width=1e-5)
    assert step.keys.tolist() == alone.keys.tolist()
    documents = torch.tensor([[-1] + [0] * 5 + [1] * 5 + [-1]])
    packed = balanced_groups(similar, similar, documents, 12, 3, is_packed=True, width=1e-5)
    assert sorted({key for key in packed.keys.flatten().tolist() if key >= 0}) == [1, 2, 3, 6, 7, 9]


def test_padding_takes_no_place() -> None:
    similar = torch.tensor([9.0, 1.0, 2.0, 9.0]).view(1, 1, 4, 1)
    groups = balanced_groups(similar, similar, torch.tensor([[-1, 0, 0, -1]]), 4, 3, is_packed=False)
    assert groups.keys.tolist() == [[[[-1, 1, 2]]]]


@pytest.mark.parametrize(("length", "places"), [(1, 1), (9, 1), (9, 2), (40, 5), (40, 8), (7, 50)])
def test_blocks_and_lists_of_queries_read_the_last_members(length: int, places: int) -> None:
    clusters = torch.randint(0, 3, (1, 2, length), generator=torch.Generator().manual_seed(length))
    documents = torch.arange(length)[None] // 11
    documents[0, 3:5] = -1
    masked = torch.where(documents[:, None] == -1, 3, clusters)
    in_blocks = block_groups(masked, 3, min(places, length))
    assert in_blocks.keys.shape[3] <= 2 * places + 1
    for head in range(2):
        blocks, expected = read_by(in_blocks, head), {}
        for query in (each for each in range(length) if documents[0, each] != -1):
            near = [
                key
                for key in range(query + 1)
                if masked[0, head, key] == masked[0, head, query] and documents[0, key] == documents[0, query]
            ]
            expected[query] = near[-places:]
            one = causal_groups(clusters, documents, torch.tensor([query]), 3, places)
            assert read_by(one, head).get(query) == expected[query]
        # documents are left out by the engine
        own = {
            query: [key for key in keys if documents[0, key] == documents[0, query]] for query, keys in blocks.items()
        }
        assert own == expected


def test_members_of_packed_documents_are_those_of_each_alone() -> None:
    lengths, places = (5, 1, 9, 3), 4
    similar = torch.randn(1, 2, 18, 3, generator=torch.Generator().manual_seed(0))
    documents = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))[None]
    packed = balanced_groups(similar, similar, documents, 18, places, is_packed=True)
    for head in range(2):
        found = {query: sorted(keys) for query, keys in read_by(packed, head).items()}
        expected: dict[int, list[int]] = {}
        for number, length in enumerate(lengths):
            start = sum(lengths[:number])
            part = similar[:, :, start : start + length]
            alone = read_by(balanced_groups(part, part, one_text(length), length, places, is_packed=False), head)
            expected |= {start + query: sorted(start + key for key in keys) for query, keys in alone.items()}
        own = {
            query: [key for key in keys if documents[0, key] == documents[0, query]] for query, keys in found.items()
        }
        assert own == expected


def changed_by_the_future(**fields: Any) -> Tensor:
    """Return by how much each of 24 tokens changes if the tokens from 12 on do."""
    model, ids = build("AutoModel", **fields), tokens(3, 24)
    other = torch.cat((ids[:, :12], tokens(3, 12, seed=9)), 1)
    with torch.no_grad():
        outs = [model(each).last_hidden_state for each in (ids, other)]
    return (outs[0] - outs[1]).abs().amax((0, 2))


@pytest.mark.parametrize("fields", [{}, {"position_embedding_type": "rope"}, {"include_self": False}])
def test_causal_membership_leaks_nothing(fields: dict[str, Any]) -> None:
    changed = changed_by_the_future(**fields)
    assert changed[:12].max() <= TOLERANCE < changed[12:].min()


def test_the_authors_membership_leaks() -> None:
    """Which keys earlier tokens read depends on later tokens; the values of those they never read."""
    assert changed_by_the_future(membership="balanced")[:12].max() > 0.1
    model, ids = build("AutoModel", membership="balanced"), tokens(1, 24)
    embedded = model.embed_tokens(ids).detach().requires_grad_()
    model(inputs_embeds=embedded).last_hidden_state[:, :12].sum().backward()
    assert embedded.grad[:, 12:].abs().max() == 0
    assert embedded.grad[:, :12].abs().max() > 0


def test_generation_with_balanced_clusters_chooses_among_the_tokens_so_far() -> None:
    """The documented rule: in one layer, each step is the last token of the text so far; it never changes later."""
    model, ids = build(num_hidden_layers=1, membership="balanced"), tokens(2, 14)
    with torch.no_grad():
        cache, steps = None, []
        for last in range(14):
            out = model(ids[:, last : last + 1], **{CACHE_ARGUMENT: cache}, use_cache=True)
            cache = out.past_key_values
            steps.append(out.logits[:, 0])
        for last in (0, 5, 13):
            so_far = model(ids[:, : last + 1], use_cache=False).logits[:, -1]
            torch.testing.assert_close(steps[last], so_far, atol=TOLERANCE, rtol=TOLERANCE)
