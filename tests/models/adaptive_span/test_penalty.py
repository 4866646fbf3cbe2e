"""The penalty of the spans: its closed forms, and that an optimizer step has it once however its batches are cut."""

from typing import Any

import pytest
import torch
from models.adaptive_span.tiny_models import random_ids, set_spans, tiny
from models_cases import checkpoint_activations

from hf_efficient_attn.models.spans.module import span_modules

RATE, LIMIT, LAYERS, HEADS = 0.01, 40, 2, 4


def penalised(**fields: Any) -> Any:
    return tiny(span_penalty=RATE, **fields).train()


def loss_of(model: Any, ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
    return model(ids, labels=ids, **inputs).loss


def gradients(model: Any) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("rows", [1, 5])
def test_equal_spans(ratio: float, rows: int) -> None:
    """The spec's test 4: all ratios c give λ·S·c·L, for batches of any size; the mean over heads, the sum of layers."""
    model = set_spans(penalised(), [[ratio * LIMIT] * HEADS] * LAYERS)
    ids = random_ids(rows, 9)
    penalty = model.model(ids).auxiliary_loss
    assert penalty.ndim == 0
    assert penalty.item() == pytest.approx(RATE * LIMIT * ratio * LAYERS)
    torch.testing.assert_close(loss_of(model, ids) - penalty, loss_of(model.eval(), ids), atol=1e-6, rtol=1e-6)


def test_gradient_of_every_ratio() -> None:
    """The spec's test 4: λ·S / H."""
    model = penalised()
    model.model(random_ids(2, 9)).auxiliary_loss.backward()
    for module in span_modules(model):
        torch.testing.assert_close(module.ratio.grad, torch.full((HEADS,), RATE * LIMIT / HEADS))


def test_authors_weight_of_the_penalty() -> None:
    """The spec, section 4: λ = 5e-7, S = 8,192 and 8 heads pull every ratio by 5.12e-4."""
    model = penalised(span_limit=8192, num_attention_heads=8, spans=[[0.0] * 8] * LAYERS)
    model.config.span_penalty = 5e-7
    model.model(random_ids(1, 5)).auxiliary_loss.backward()
    assert span_modules(model)[0].ratio.grad.tolist() == pytest.approx([5.12e-4] * 8)


@pytest.mark.parametrize("head", ["ForCausalLM", "ForSequenceClassification"])
def test_evaluation_and_weight_zero_have_none(head: str) -> None:
    """The spec's test 4."""
    model, ids = tiny(head, span_penalty=RATE), random_ids(2, 9)
    labels = ids if head == "ForCausalLM" else torch.zeros(2, dtype=torch.long)
    plain = model(ids, labels=labels).loss
    assert model.model(ids).auxiliary_loss is None
    trained = model.train()(ids, labels=labels).loss
    torch.testing.assert_close(trained, plain + model.model(ids).auxiliary_loss)
    model.config.span_penalty = 0.0
    torch.testing.assert_close(model(ids, labels=labels).loss, plain)


@pytest.mark.parametrize("fields", [{"span": "fixed"}, {"frozen_spans": [[0.0] * 4] * 2, "span_penalty": 0.0}])
def test_what_is_not_trained_is_not_penalised(fields: dict[str, Any]) -> None:
    assert tiny(**fields).train().model(random_ids(2, 9)).auxiliary_loss is None


@pytest.mark.parametrize("span", ["adaptive", "dynamic"])
@pytest.mark.parametrize("lengths", [(12, 12), (12, 5), (3, 7, 12)])
def test_shares_of_accumulated_batches_add_up_to_one(lengths: tuple[int, ...], span: str) -> None:
    """Batches of unequal numbers of tokens weigh the penalty as they weigh the loss."""
    model, batches = penalised(span=span), [random_ids(1, tokens, seed=tokens) for tokens in lengths]
    num_items = torch.tensor(sum(tokens - 1 for tokens in lengths))
    shares = [loss_of(model, ids, num_items_in_batch=num_items) for ids in batches]
    plain = [loss_of(model.eval(), ids, num_items_in_batch=num_items) for ids in batches]
    model.train()
    penalties = [model.model(ids).auxiliary_loss for ids in batches]
    expected = sum(p * (tokens - 1) for p, tokens in zip(penalties, lengths, strict=True)) / num_items
    torch.testing.assert_close(sum(shares) - sum(plain), expected, atol=1e-6, rtol=1e-5)
    if span == "adaptive":
        torch.testing.assert_close(expected, penalties[0])


@pytest.mark.parametrize("name", ["labels", "shift_labels"])
def test_tokens_that_are_not_counted_have_no_share(name: str) -> None:
    """However the labels are given, also by a caller that names the other way and says None."""
    model, ids = penalised(), random_ids(2, 9)
    labels = ids.clone()
    labels[0, 3:] = -100
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    given = {"labels": labels, "shift_labels": None if name == "labels" else shifted}
    whole = model(ids, num_items_in_batch=10, **given).loss
    assert float(shifted.ne(-100).sum()) == 10
    torch.testing.assert_close(whole, model(ids, **given).loss)
    torch.testing.assert_close(model(ids, num_items_in_batch=40, **given).loss * 4, whole)


def test_four_batches_of_one_row_step_as_one_batch_of_four() -> None:
    ids = random_ids(4, 12)
    together, apart = penalised(), penalised()
    loss_of(together, ids).backward()
    for row in ids:
        loss_of(apart, row[None], num_items_in_batch=4 * 11).backward()
    for one, other in zip(gradients(together), gradients(apart), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


def test_dynamic_spans_are_averaged_over_real_tokens() -> None:
    model, ids = penalised(span="dynamic"), random_ids(2, 12)
    alone = model.model(ids[:, :8]).auxiliary_loss
    mask = torch.ones_like(ids)
    mask[:, 8:] = 0
    torch.testing.assert_close(model.model(ids, attention_mask=mask).auxiliary_loss, alone)
    assert not torch.isclose(model.model(ids).auxiliary_loss, alone)
    penalty = model.model(ids).auxiliary_loss
    spans = torch.stack([module.head_spans().mean() for module in span_modules(model)])
    torch.testing.assert_close(penalty, RATE * spans.sum())


def test_checkpointing_of_layers_counts_the_penalty_once() -> None:
    ids, found = random_ids(2, 12), []
    for is_checkpointed in (False, True):
        model = penalised()
        if is_checkpointed:
            checkpoint_activations(model)
        loss_of(model, ids, use_cache=False).backward()
        found.append(gradients(model))
    for plain, checkpointed in zip(*found, strict=True):
        torch.testing.assert_close(checkpointed, plain, atol=1e-6, rtol=1e-5)


def test_a_loss_of_ones_own_finds_the_penalty() -> None:
    model, ids = penalised(), random_ids(2, 9)
    torch.testing.assert_close(model(ids).auxiliary_loss, model.model(ids).auxiliary_loss)
    assert "auxiliary_loss" not in model.eval()(ids)
