"""What heads of stars read: relay and maximum, pairs of them, or every token."""

import pytest
import torch
from models.star_transformer.tiny_models import build, random_ids

DENSE = {"classifier_head": "dense", "num_labels": 3}


def by_hand(model: torch.nn.Module, features: torch.Tensor) -> torch.Tensor:
    inner = features @ model.classifier.dense.weight.T + model.classifier.dense.bias
    inner = torch.where(inner > 0, inner, 0.01 * inner)
    return inner @ model.classifier.out_proj.weight.T + model.classifier.out_proj.bias


def represented(outputs: object, row: slice, number: int, pooling: str) -> torch.Tensor:
    nodes, relay = outputs.last_hidden_state[:, row], outputs.relay_states[:, number]
    highest = nodes.max(1).values
    return {"relay_max": (relay + highest) / 2, "relay": relay, "max": highest, "mean": nodes.mean(1)}[pooling]


@pytest.mark.parametrize("pooling", ["relay_max", "relay", "max", "mean"])
@torch.no_grad()
def test_texts_and_pairs(pooling: str) -> None:
    ids, types = random_ids(2, 9), torch.tensor([[0] * 4 + [1] * 5] * 2)
    mask = torch.ones_like(ids)
    mask[:, 8:] = 0
    model = build("AutoModelForSequenceClassification", classifier_pooling=pooling, **DENSE)
    expected = by_hand(model, represented(model.model(ids, mask), slice(8), 0, pooling))
    torch.testing.assert_close(model(ids, mask).logits, expected)
    pairs = {"separate_sentences": True, "classifier_pooling": pooling}
    model = build("AutoModelForSequenceClassification", **pairs, **DENSE)
    outputs = model.model(ids, mask, token_type_ids=types)
    u, v = (represented(outputs, row, number, pooling) for number, row in enumerate((slice(4), slice(4, 8))))
    expected = by_hand(model, torch.cat((u, v, (u - v).abs(), u * v), -1))
    torch.testing.assert_close(model(ids, mask, token_type_ids=types).logits, expected)
    choice = build("AutoModelForMultipleChoice", **pairs, **DENSE)
    stacked = [each[:, None].expand(-1, 2, -1) for each in (ids, mask, types)]
    assert choice(stacked[0], stacked[1], token_type_ids=stacked[2]).logits.shape == (2, 2)


@torch.no_grad()
def test_every_token_has_the_head_of_texts() -> None:
    model, ids = build("AutoModelForTokenClassification", **DENSE), random_ids(2, 7)
    expected = by_hand(model, model.model(ids).last_hidden_state)
    torch.testing.assert_close(model(ids).logits, expected)


@torch.no_grad()
def test_no_tokens_have_the_maximum_0() -> None:
    model, ids = build("AutoModelForSequenceClassification", classifier_pooling="max"), random_ids(2, 7)
    mask = torch.ones_like(ids)
    mask[0] = 0
    assert torch.equal(model(ids, mask).logits[0], model.classifier.bias)
