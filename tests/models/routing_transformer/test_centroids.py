"""How centroids move: means of what was near them, in training alone, once for a forward pass."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from models.routing_transformer.tiny_models import build, tokens
from models_cases import checkpoint_activations
from torch import Tensor

import hf_efficient_attn as hea
from hf_efficient_attn.models.routing_transformer.clusters import on_sphere


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


def test_an_adapter_alone_is_trained_where_every_layer_is_frozen() -> None:
    model, ids = build().requires_grad_(False), tokens(2, 20)
    before = state_of(model)
    model.lm_head.weight.requires_grad_(True)
    step(model, ids)
    assert all(torch.equal(one, other) for one, other in zip(before, state_of(model), strict=True))


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_they_stay_in_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    model = build().to(dtype)
    assert {each.dtype for each in state_of(model)} == {torch.float32}
    model.save_pretrained(tmp_path)
    again = hea.RoutingTransformerForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert {each.dtype for each in state_of(again)} == {torch.float32}


def test_states_that_are_not_finite_show_nothing() -> None:
    model, ids = build(), tokens(2, 30)
    embedded = model.model.embed_tokens(ids).detach().clone()
    embedded[0, 3] = torch.nan
    model.train()(inputs_embeds=embedded)
    assert all(each.isfinite().all() for each in state_of(model))
