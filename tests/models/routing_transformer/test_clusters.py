"""Which tokens are in which cluster, and how centroids move."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from models.routing_transformer.tiny_models import build, tokens
from models_cases import TOLERANCE, checkpoint_activations
from torch import Tensor

import hf_efficient_attn as hea
from hf_efficient_attn.integration.forward_context import CACHE_ARGUMENT
from hf_efficient_attn.models.routing_transformer.clusters import (
    balanced_groups,
    block_groups,
    causal_groups,
    on_sphere,
)


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


def state_of(model: Any) -> list[Tensor]:
    return [each.clone() for name, each in model.named_buffers() if "centroids" in name]


def routed_queries(model: Any, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the queries of the first layer's routing heads on the sphere, [heads, real tokens, D]."""
    layer = model.model.layers[0].self_attn
    query = on_sphere(layer.q_proj(model.model.embed_tokens(ids)).unflatten(-1, (-1, 8)))[:, :, :2]
    real = torch.ones_like(ids).bool() if mask is None else mask.bool()
    return query[real].transpose(0, 1).detach()


def step(model: Any, ids: Tensor, **inputs: Any) -> Any:
    out = model.train()(ids, labels=ids, **inputs)
    out.loss.backward()
    return out


@pytest.mark.parametrize("is_causal", [True, False])
def test_start_on_the_sphere(is_causal: bool) -> None:
    centroids = build("AutoModel", is_causal=is_causal).layers[0].self_attn.centroids
    assert centroids.means.shape == (2, 3, 8)
    torch.testing.assert_close(centroids.means.mean(-1), torch.zeros(2, 3), atol=1e-6, rtol=0)
    torch.testing.assert_close(centroids.means.norm(dim=-1), torch.full((2, 3), 8**0.5), atol=1e-3, rtol=0)


def test_with_decay_0_they_are_the_means_of_the_batch() -> None:
    model, ids = build(centroid_decay=0.0), tokens(2, 30)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    queries = routed_queries(model, ids, mask)
    centroids = model.model.layers[0].self_attn.centroids
    before = centroids.means.clone()
    nearest = (queries @ before.transpose(1, 2)).argmax(-1)
    step(model, ids, attention_mask=mask)
    for head in range(2):
        for cluster in range(3):
            members = queries[head][nearest[head] == cluster]
            # a centroid that nothing is near stays
            expected = members.mean(0) if len(members) else before[head, cluster]
            torch.testing.assert_close(centroids.means[head, cluster], expected)


def test_they_are_moving_averages_of_sums_and_counts() -> None:
    model, decay = build(centroid_decay=0.9), 0.9
    centroids = model.model.layers[0].self_attn.centroids
    sums, counts = torch.zeros(2, 3, 8), torch.zeros(2, 3)
    for seed in range(4):
        ids = tokens(2, 20, seed)
        queries = routed_queries(model, ids)
        near = torch.nn.functional.one_hot((queries @ centroids.means.transpose(1, 2)).argmax(-1), 3).float()
        sums = decay * sums + (1 - decay) * near.transpose(1, 2) @ queries
        counts = decay * counts + (1 - decay) * near.sum(1)
        step(model, ids)
        known = counts > 0
        torch.testing.assert_close(centroids.means[known], (sums / counts[..., None])[known])
    assert known.all()


def test_queries_and_keys_that_differ_move_them_together() -> None:
    model, ids = build(is_causal=False), tokens(2, 20)
    step(model, ids)
    # two routing heads, 40 tokens, as queries and as keys
    assert float(model.model.layers[0].self_attn.centroids.counts.sum()) == pytest.approx(2 * 40 * 2 * 0.001)


def test_commitment_is_the_mean_squared_distance_in_every_layer() -> None:
    """With shared queries and keys it counts twice, as in the authors' code."""
    model, ids = build(num_hidden_layers=1, commitment_weight=0.5), tokens(2, 30)
    queries = routed_queries(model, ids)
    means = model.model.layers[0].self_attn.centroids.means.clone()
    nearest = (queries @ means.transpose(1, 2)).argmax(-1)
    own = torch.stack([means[head][nearest[head]] for head in range(2)])
    out = step(model, ids)
    torch.testing.assert_close(out.auxiliary_loss, 0.5 * 2 * (queries - own).square().mean())
    model.eval()
    assert model(ids, labels=ids).auxiliary_loss is None


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_moves_them_once_and_changes_no_gradient(use_reentrant: bool) -> None:
    plain = build()
    checkpointed = copy.deepcopy(plain)
    checkpoint_activations(checkpointed.train(), {"use_reentrant": use_reentrant})
    for seed in range(3):
        for model in (plain, checkpointed):
            model.zero_grad()
            step(model, tokens(2, 20, seed))
        for one, other in zip(plain.parameters(), checkpointed.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, atol=1e-6, rtol=1e-5)
    for one, other in zip(state_of(plain), state_of(checkpointed), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


def test_evaluation_and_passes_without_gradient_move_nothing() -> None:
    model, ids = build(), tokens(2, 20)
    before = state_of(model)
    model(ids)
    with torch.no_grad():
        model.train()(ids)
    assert all(torch.equal(one, other) for one, other in zip(before, state_of(model), strict=True))


def test_decay_1_keeps_them_between_the_passes_of_a_step() -> None:
    """GradCache computes all mini-batches without gradients, and then each again with those of the first passes."""
    model, batches = build("AutoModel", is_causal=False).train(), tokens(4, 20).split(2)
    model(batches[0])
    model.config.centroid_decay = 1.0
    with torch.no_grad():
        first = [model(ids).last_hidden_state for ids in batches]
    before = state_of(model)
    second = [model(ids).last_hidden_state for ids in batches]
    torch.testing.assert_close(second, first, atol=1e-5, rtol=1e-5)
    assert all(torch.equal(*each) for each in zip(state_of(model), before, strict=True))


def test_frozen_projections_keep_them() -> None:
    """An adapter is saved without them: they must stay those of its base."""
    model, ids = build(), tokens(2, 20)
    before = state_of(model)
    model.model.layers[0].self_attn.q_proj.weight.requires_grad_(False)
    step(model, ids)
    are_equal = [torch.equal(one, other) for one, other in zip(before, state_of(model), strict=True)]
    assert are_equal == [True] * 3 + [False] * 3


def test_training_goes_on_from_a_saved_model_as_without_saving(tmp_path: Path) -> None:
    model = build()
    step(model, tokens(2, 20))
    model.save_pretrained(tmp_path)
    again = hea.RoutingTransformerForCausalLM.from_pretrained(tmp_path)
    for each in (model, again):
        each.zero_grad()
        step(each, tokens(2, 20, seed=5))
    assert len(state_of(model)) == 6
    for one, other in zip(state_of(model), state_of(again), strict=True):
        torch.testing.assert_close(one, other, atol=1e-7, rtol=1e-6)


def test_they_stay_in_float32(tmp_path: Path) -> None:
    model = build().bfloat16()
    assert {each.dtype for each in state_of(model)} == {torch.float32}
    model.save_pretrained(tmp_path)
    again = hea.RoutingTransformerForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {each.dtype for each in state_of(again)} == {torch.float32}


def test_states_that_are_not_finite_show_nothing() -> None:
    model, ids = build(), tokens(2, 30)
    embedded = model.model.embed_tokens(ids).detach().clone()
    embedded[0, 3] = torch.nan
    model.train()(inputs_embeds=embedded)
    assert all(each.isfinite().all() for each in state_of(model))
