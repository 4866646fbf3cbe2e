"""Rotations and buckets of the definition; presets."""

from typing import Any

import pytest
import torch
from families import BY_NAME
from models_cases import TINY

import hf_efficient_attn as hea
from hf_efficient_attn.messages import warn_once
from hf_efficient_attn.models.efficient_reformer.hashing import draw_rotations, hash_vectors, normals

STEP = torch.tensor(0)


def test_rotations_are_normal_and_independent() -> None:
    drawn = normals((200, 500), 3, 1, STEP).double()
    assert abs(drawn.mean()) < 0.01
    assert abs(drawn.std() - 1) < 0.01
    assert abs((drawn**4).mean() - 3) < 0.1
    for seed, layer, step in ((3, 2, 0), (4, 1, 0), (3, 1, 1)):
        other = normals((200, 500), seed, layer, torch.tensor(step)).double()
        assert abs((drawn * other).mean()) < 0.01
    assert abs((drawn[:, 1:] * drawn[:, :-1]).mean()) < 0.01


def test_rotations_neither_read_nor_change_the_random_state_of_torch() -> None:
    torch.manual_seed(0)
    before, first = torch.get_rng_state(), normals((8,), 0, 0, STEP)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert torch.equal(normals((8,), 0, 0, STEP), first)


def test_buckets_are_those_of_the_definition() -> None:
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(2, 3, 50, 8, generator=generator)
    rotations = draw_rotations(3, 8, 2, (4, 6), 0, 0, STEP)
    rotated = torch.einsum("bhnd,hdrc->bhrnc", vectors, rotations)
    ones, sixths = (torch.cat((part, -part), -1).argmax(-1) for part in rotated.split([2, 3], -1))
    assert torch.equal(hash_vectors(vectors, rotations, (4, 6)).long(), ones + 4 * sixths)


def test_of_equal_places_the_first_counts_and_vectors_without_numbers_have_a_bucket() -> None:
    rotations = torch.eye(4).view(1, 4, 1, 4)
    vectors = torch.tensor([[[[0.0, 0.0, 0.0, 0.0], [1.0, -2.0, 2.0, 0.0], [float("nan"), 1.0, 1.0, 1.0]]]])
    *known, unknown = hash_vectors(vectors, rotations, (8,))[0, 0, 0].tolist()
    assert known == [0, 5]
    assert 0 <= unknown < 8


def test_buckets_are_balanced() -> None:
    vectors = torch.randn(1, 1, 40_000, 64, generator=torch.Generator().manual_seed(0))
    counts = hash_vectors(vectors, draw_rotations(1, 64, 1, (16,), 0, 0, STEP), (16,)).flatten().bincount(minlength=16)
    # the rotations are not orthogonal, which is a fixed part of the deviation
    assert float((counts / 2_500 - 1).abs().max()) < 0.5
    near = vectors + 0.05 * torch.randn(vectors.shape, generator=torch.Generator().manual_seed(1))
    pairs = [hash_vectors(each, draw_rotations(1, 64, 1, (16,), 0, 0, STEP), (16,)) for each in (vectors, near)]
    assert (pairs[0] == pairs[1]).float().mean() > 0.9


def test_training_draws_new_rotations_which_a_seed_repeats_and_evaluation_none() -> None:
    case = BY_NAME["reformer-masked"]
    model, inputs = case.model(hash_seed=None).train(), case.inputs()
    torch.manual_seed(0)
    first, second = model(**inputs).loss, model(**inputs).loss
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(model(**inputs).loss, first)
    before = torch.get_rng_state()
    with torch.no_grad():
        assert torch.equal(model.eval()(**inputs).loss, model(**inputs).loss)
    model.config.hash_seed = 3
    assert torch.equal(model.train()(**inputs).loss, model(**inputs).loss)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("changed", [{"hash_seed": 7}, {"num_hashes": 7}, {"num_buckets": [2, 4]}])
def test_what_hashing_depends_on_may_change_between_calls(changed: dict[str, Any]) -> None:
    case = BY_NAME["reformer-masked"]
    model, inputs = case.model(num_buckets=[8]).eval(), case.inputs()
    fresh = case.model(**{"num_buckets": [8], **changed}).eval()
    fresh.load_state_dict(model.state_dict())
    with torch.no_grad():
        first = model(**inputs).logits
        for name, value in changed.items():
            setattr(model.config, name, value)
        second = model(**inputs).logits
        assert not torch.equal(second, first)
        assert torch.equal(second, fresh(**inputs).logits)


def test_bucket_factors_of_long_texts() -> None:
    build = hea.EfficientReformerConfig
    assert build(max_position_embeddings=4096).bucket_factors == (128,)
    assert build(max_position_embeddings=65_536).bucket_factors == (32, 64)
    assert build(num_buckets=[64, 128]).bucket_factors == (64, 128)


BUILD = hea.EfficientReformerConfig


@pytest.mark.parametrize(
    ("preset", "parameters"), [("enwik8", 149_182_722), ("imagenet64", 60_664_832), ("copy_task", 436_864)]
)
def test_presets_have_so_many_parameters(preset: str, parameters: int) -> None:
    """The first is that of the released checkpoint, as transformers counts it."""
    with torch.device("meta"):
        model = hea.EfficientReformerForCausalLM(getattr(BUILD, preset)())
    assert sum(each.numel() for each in model.parameters()) == parameters


def test_heads_may_be_wider_than_the_states_and_embeddings_tied() -> None:
    config = BUILD(**TINY, head_dim=12, tie_word_embeddings=True, is_causal=True, gated_mlp=True)
    model = hea.EfficientReformerForCausalLM(config).eval()
    ids = torch.arange(3, 15)[None]
    out = model(ids, labels=ids)
    out.loss.backward()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(each.grad is not None for each in model.parameters())


def test_streams_side_by_side_are_wider_than_libraries_are_told() -> None:
    """As in the presets and in converted checkpoints; under a head, nobody asks."""
    warn_once.cache_clear()
    ids = torch.arange(3, 15)[None]
    config = BUILD(**TINY, stream_join="concat")
    hea.EfficientReformerForMaskedLM(config)(ids)
    model = hea.EfficientReformerModel(config)
    with pytest.warns(UserWarning, match="hidden_size=32"):
        assert model(ids).last_hidden_state.shape[-1] == model.config.output_width == 64


def test_axial_positions_are_the_coordinates_side_by_side() -> None:
    model = hea.EfficientReformerModel(BUILD(**{**TINY, "max_position_embeddings": 24}, axial_pos_shape=[2, 3, 4]))
    positions = model.positions.table
    first, second, third = positions.axes
    found = positions(torch.arange(24)[None])[0]
    for index in range(24):
        expected = torch.cat((first[index // 12], second[index // 4 % 3], third[index % 4]))
        assert torch.equal(found[index], expected)
