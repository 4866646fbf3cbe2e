"""Pairs of sentences: a tree each, layers that read across, and classes of both roots."""

from typing import Any

import pytest
import torch
from models.bp_transformer.tiny_models import build
from models.bp_transformer.tree_by_nodes import pair_by_nodes
from models_cases import TOLERANCE, random_ids
from torch.nn.functional import pad

import hf_efficient_attn as hea

PAIRS: dict[str, Any] = {"separate_sentences": True, "cross_layers": 2, "num_hidden_layers": 1, "num_nodes": 1}
SIZES = (6, 3)
TYPES = torch.tensor([[0] * 6 + [1] * 3])
HEAD = "AutoModelForSequenceClassification"


def test_states_and_gradients_are_those_of_the_specification() -> None:
    model, ids = build("AutoModel", **PAIRS).double(), random_ids(1, 9)
    found = model(ids, token_type_ids=TYPES)
    weights = dict(model.named_parameters())
    expected = pair_by_nodes(model.config, weights, weights["embed_tokens.weight"][ids[0]].split(SIZES))
    tokens, roots = (torch.cat([each[place].view(-1, 32) for each in expected]) for place in (0, 1))
    torch.testing.assert_close(found.last_hidden_state[0], tokens, atol=1e-12, rtol=1e-9)
    torch.testing.assert_close(found.root_states[0], roots, atol=1e-12, rtol=1e-9)
    assert found.pooler_output is None
    named = {name: each for name, each in weights.items() if not name.startswith("embed_tokens")}
    totals = [
        (states * torch.arange(states.numel()).view_as(states).sin()).sum()
        for states in (torch.cat((found.last_hidden_state[0], found.root_states[0])), torch.cat((tokens, roots)))
    ]
    own, other = (torch.autograd.grad(each, list(named.values()), allow_unused=True) for each in totals)
    for name, one, wanted in zip(named, own, other, strict=True):
        wanted = torch.zeros_like(one) if wanted is None else wanted
        torch.testing.assert_close(one, wanted, atol=1e-10, rtol=1e-8, msg=name)


@pytest.mark.parametrize("pooling", ["root", "first", "last", "mean"])
@torch.no_grad()
def test_padding_and_batch_mates_change_nothing(pooling: str) -> None:
    model = build(HEAD, **PAIRS, classifier_pooling=pooling, classifier_head="dense")
    ids, mate = random_ids(1, 9), random_ids(1, 12, seed=3)
    plain = model(ids, token_type_ids=TYPES).logits
    for before, behind in ((3, 0), (0, 3)):
        padded, kinds, mask = (pad(each, (before, behind)) for each in (ids, TYPES, torch.ones_like(ids)))
        rows = {"input_ids": torch.cat((padded, mate)), "attention_mask": pad(mask, (0, 0, 0, 1), value=1)}
        types = torch.cat((kinds, torch.tensor([[0] * 4 + [1] * 8])))
        found = model(**rows, token_type_ids=types).logits[:1]
        torch.testing.assert_close(found, plain, atol=TOLERANCE, rtol=TOLERANCE)
    changed = torch.cat((ids[:, :8], ids[:, 8:] % 50 + 5), 1)
    assert not torch.allclose(model(changed, token_type_ids=TYPES).logits, plain, atol=1e-4)


@torch.no_grad()
def test_without_layers_across_sentences_are_as_alone() -> None:
    model, ids = build("AutoModel", separate_sentences=True), random_ids(1, 9)
    pair = model(ids, token_type_ids=TYPES)
    for number, part in enumerate((slice(6), slice(6, None))):
        # a pair with an empty sentence, which has no root
        alone = model(ids[:, part], token_type_ids=torch.full_like(ids[:, part], number))
        torch.testing.assert_close(pair.last_hidden_state[:, part], alone.last_hidden_state)
        torch.testing.assert_close(pair.root_states[:, number], alone.root_states[:, number])
        assert (alone.root_states[:, 1 - number] == 0).all()


def test_pairs_must_be_told_apart() -> None:
    model, ids = build("AutoModel", **PAIRS), random_ids(2, 6)
    with pytest.raises(hea.InputError, match="token_type_ids"):
        model(ids)
    with pytest.raises(hea.InputError, match="row 1 change 2 times, but each sentence must stand in one piece"):
        model(ids, token_type_ids=torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 0, 0]]))
    with pytest.raises(hea.InputError, match="other than 0, but this model reads no pairs"):
        build("AutoModel")(ids, token_type_ids=torch.ones_like(ids))


def test_every_parameter_of_the_preset_trains() -> None:
    """Under DDP, each needs a gradient."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 61}
    model = hea.BPTransformerForSequenceClassification(hea.BPTransformerConfig.snli(**sizes)).train()
    model(random_ids(1, 9), token_type_ids=TYPES, labels=torch.tensor([2])).loss.backward()
    assert [name for name, each in model.named_parameters() if each.grad is None] == []
    assert model.classifier.out_proj.weight.shape == (3, 24)
