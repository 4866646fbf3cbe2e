"""The penalty of the spans in closed forms, once a step however batches are cut; and a head that grows."""

from typing import Any

import pytest
import torch
from models.adaptive_span.tiny_models import random_ids, set_spans, tiny

import hf_efficient_attn as hea
from hf_efficient_attn.models.spans.module import span_modules
from hf_efficient_attn.models.spans.training import max_span

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


VOCAB, TOKENS, COPY_RAMP, COPY_LIMIT = 8, 96, 8, 64


def runs(rows: int, generator: torch.Generator) -> torch.Tensor:
    """Return tokens [rows, TOKENS] that last for 16 places on average.

    So a nearer token says something of the one k before, and every longer span helps a little; among independent
    tokens nothing would, before the ramp reaches k.
    """
    is_new = torch.rand(rows, TOKENS, generator=generator) < 1 / 16
    tokens = torch.randint(0, VOCAB, (rows, TOKENS), generator=generator)
    first = torch.where(is_new, torch.arange(TOKENS), 0).cummax(1).values
    return tokens.gather(1, first)


def batch(distance: int, rows: int, generator: torch.Generator) -> dict[str, Any]:
    """Return a text whose target is, everywhere, the token `distance` before the place that predicts."""
    ids = runs(rows, generator)
    target = torch.nn.functional.pad(ids[:, :-distance], (distance, 0), value=-100)
    return {"input_ids": ids, "labels": ids, "shift_labels": target, "use_cache": False}


def train(distance: int, seed: int, steps: int) -> tuple[Any, dict[str, Any]]:
    """Return a trained model of one layer and two heads in eval mode, and a batch it has not seen."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    config = hea.AdaptiveSpanConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        span_limit=COPY_LIMIT,
        span_ramp=COPY_RAMP,
        span_penalty=4e-3,
    )
    model = hea.AdaptiveSpanForCausalLM(config).train()
    optimizer = torch.optim.AdamW(hea.optimizer_groups(model, 0.0, span_lr=1e-2), lr=5e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        model(**batch(distance, 8, generator)).loss.backward()
        optimizer.step()
    return model.eval(), batch(distance, 64, generator)


def test_one_head_grows_until_it_reads_the_token() -> None:
    """With this seed; with half of the others, both heads grow."""
    distance = 24
    model, unseen = train(distance, seed=3, steps=200)
    (spans,) = span_modules(model)
    short, long = spans.head_spans().sort().values.tolist()
    # from 0, where the ramp ends at a distance of 8
    assert max_span(model) >= distance
    assert long < distance
    assert short < 1
    with torch.no_grad():
        assert model(**unseen).loss < 0.3
        spans.ratio.zero_()
        assert model(**unseen).loss > 1.0
