"""Texts read in segments, each with what the layers remember of the one before."""

import copy
import math
from typing import Any

import pytest
import torch
from models.adaptive_span.tiny_models import random_ids, set_spans, tiny
from models_cases import checkpoint_activations

import hf_efficient_attn as hea
from hf_efficient_attn.integration.forward_context import CACHE_ARGUMENT

CASES = {
    "relative keys": {},
    "rotary": {"preset": "modern"},
    "dynamic": {"span": "dynamic"},
    "fixed": {"preset": "modern", "span": "fixed"},
    "frozen": {"frozen_spans": [[0.0, 3.5, 12.0, 40.0], [0.0, 0.0, 1.25, 7.0]], "span_penalty": 0.0},
    "long ramp": {"span_ramp": 64},
}


def number(index: int, rows: int = 2) -> torch.Tensor:
    return torch.full((rows,), index)


def by_segments(model: Any, ids: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return the logits [B, T, vocab_size] of a text read in segments of so many tokens."""
    segments = ids.split(tokens, 1)
    return torch.cat([model(part, segment_index=number(index)).logits for index, part in enumerate(segments)], 1)


@pytest.mark.parametrize("tokens", [1, 7, 32, 90])
@pytest.mark.parametrize("fields", CASES.values(), ids=CASES)
def test_segments_equal_one_long_pass(fields: dict[str, Any], tokens: int) -> None:
    """The spec's test 7, with segments shorter and longer than the spans, and a last one that is shorter."""
    model, ids = tiny(**fields), random_ids(2, 129 if tokens > 1 else 60)
    with torch.no_grad():
        expected = model(ids).logits
        torch.testing.assert_close(by_segments(model, ids, tokens), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_other_kernels_remember(kernel: str) -> None:
    model, ids = tiny(), random_ids(2, 70)
    model.set_attn_implementation(kernel)
    with torch.no_grad():
        torch.testing.assert_close(by_segments(model, ids, 20), model(ids).logits, atol=1e-5, rtol=1e-5)


def test_a_segment_does_read_the_one_before() -> None:
    model, ids = tiny(), random_ids(2, 40)
    with torch.no_grad():
        remembered = by_segments(model, ids, 20)[:, 20:]
        alone = model(ids[:, 20:]).logits
    assert not torch.allclose(remembered[:, 0], alone[:, 0], atol=1e-2)


def test_only_what_spans_can_read_is_kept() -> None:
    """The longest span of a layer, its ramp, and 64 tokens by which spans can grow, but never beyond the limit."""
    model = tiny(span_limit=200, spans=[[0.0, 3.5, 12.0, 0.0], [0.0, 150.0, 0.0, 0.0]])
    for index in range(9):
        model(random_ids(2, 30), segment_index=number(index))
        lengths = [states.shape[1] for states in model.model.memory.open(number(index + 1), False, 2).memories]
        seen = 30 * (index + 1)
        assert lengths == [min(seen, 12 + 4 + 64), min(seen, 200)]


def test_only_what_dynamic_spans_read_is_projected() -> None:
    """All of the limit is kept for them, but no token of this segment may read as far."""
    model, lengths = tiny(span="dynamic", span_limit=200), []
    for layer in model.model.layers:
        layer.self_attn.spans.bias.data.fill_(-3.0)
        layer.self_attn.spans.weight.data.zero_()
        layer.self_attn.k_proj.register_forward_pre_hook(lambda _, inputs: lengths.append(inputs[0].shape[1]))
    longest = 200 / (1 + math.exp(3.0))
    with torch.no_grad():
        by_segments(model, random_ids(2, 90), 30)
    # the first token of a segment reads ceil(z) + R keys before itself
    assert lengths == [30, 30, *[30 + math.ceil(longest) + 4] * 4]


def test_grown_spans_read_what_is_there() -> None:
    """The spec's test 10: no more is remembered than the shorter spans needed, and nothing fails."""
    model, ids = tiny(span_limit=300, spans=[[0.0] * 4] * 2), random_ids(2, 220)
    with torch.no_grad():
        for index in range(4):
            model(ids[:, 50 * index : 50 * (index + 1)], segment_index=number(index))
        set_spans(model, [[250.0] * 4] * 2)
        hidden = model.model(ids[:, 200:], segment_index=number(4)).last_hidden_state
    assert hidden.isfinite().all()


def test_no_gradient_flows_into_memory() -> None:
    """The second segment's gradient is that of a pass that takes the remembered states as constants."""
    model, ids = tiny(span_penalty=0.0).train(), random_ids(2, 40)
    model(ids[:, :20], segment_index=number(0)).logits.sum().backward()
    first = [states.requires_grad for states in model.model.memory.open(number(1), True, 2).memories]
    assert first == [False, False]
    model.zero_grad()
    second = model(ids[:, 20:], segment_index=number(1), labels=ids[:, 20:]).loss
    second.backward()
    gradient = model.model.embed_tokens.weight.grad
    only_before = sorted(set(ids[:, :20].flatten().tolist()) - set(ids[:, 20:].flatten().tolist()))
    assert only_before
    assert not gradient[only_before].any()
    assert model.model.layers[0].self_attn.k_proj.weight.grad.any()


def test_checkpointing_of_layers_reads_the_same_memory() -> None:
    ids, gradients = random_ids(2, 40), []
    for is_checkpointed in (False, True):
        model = tiny(span_penalty=0.01).train()
        if is_checkpointed:
            checkpoint_activations(model)
        for index in range(2):
            part = ids[:, 20 * index : 20 * (index + 1)]
            model(part, labels=part, segment_index=number(index)).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for plain, checkpointed in zip(*gradients, strict=True):
        torch.testing.assert_close(checkpointed, plain, atol=1e-6, rtol=1e-5)


def test_training_and_evaluation_remember_apart() -> None:
    model, ids = tiny(), random_ids(2, 60)
    with torch.no_grad():
        expected = model(ids).logits[:, 20:40]
        model.train()(ids[:, :20], segment_index=number(0))
        model.eval()(ids[:, 40:], segment_index=number(0))
        model(ids[:, :20], segment_index=number(1))
        actual = model.train()(ids[:, 20:40], segment_index=number(1)).logits
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_calls_in_between_leave_the_memory_alone() -> None:
    model, ids = tiny(), random_ids(2, 60)
    with torch.no_grad():
        expected = model(ids).logits[:, 20:40]
        model(ids[:, :20], segment_index=number(0))
        model(random_ids(3, 11, seed=9))
        model.generate(random_ids(1, 5), max_new_tokens=3, do_sample=False)
        actual = model(ids[:, 20:40], segment_index=number(1)).logits
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_segment_zero_begins_anew() -> None:
    model, ids = tiny(), random_ids(2, 20)
    with torch.no_grad():
        model(random_ids(2, 20, seed=7), segment_index=number(0))
        # with another number of rows, too
        for rows in (2, 1):
            actual = model(ids[:rows], segment_index=number(0, rows)).logits
            torch.testing.assert_close(actual, model(ids[:rows]).logits, atol=1e-6, rtol=1e-6)


def test_reset_memory_forgets() -> None:
    model, ids = tiny(), random_ids(2, 20)
    for is_training in (True, False):
        model.train(is_training)(ids, segment_index=number(0))
    model.reset_memory()
    for is_training in (True, False):
        with pytest.raises(hea.InputError, match="segment_index=1"):
            model.train(is_training)(ids, segment_index=number(1))


@pytest.mark.parametrize("index", [0, 1, 2, 3, 7])
def test_segments_out_of_order(index: int) -> None:
    model, ids = tiny(), random_ids(2, 20)
    for segment in range(2):
        model(ids, segment_index=number(segment))
    if index in (0, 2):
        model(ids, segment_index=number(index))
        return
    with pytest.raises(hea.InputError, match=rf"segment_index={index} of 2 rows, but 1 of 2 rows before.*in order"):
        model(ids, segment_index=number(index))


def test_rows_at_different_segments() -> None:
    with pytest.raises(hea.InputError, match="segment_index"):
        tiny()(random_ids(2, 20), segment_index=torch.tensor([0, 1]))


def test_a_batch_of_other_size() -> None:
    model = tiny()
    model(random_ids(3, 20), segment_index=number(0, 3))
    with pytest.raises(hea.InputError, match="segment_index=1"):
        model(random_ids(2, 20), segment_index=number(1))


@pytest.mark.parametrize("shape", [(), (2, 1), (3,), (1,)])
def test_segment_index_of_another_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(hea.InputError, match="segment_index"):
        tiny()(random_ids(2, 20), segment_index=torch.zeros(shape, dtype=torch.long))


@pytest.mark.parametrize("side", [slice(0, 3), slice(-3, None)])
def test_padding_has_no_place_in_memory(side: slice) -> None:
    ids = random_ids(2, 20)
    mask = torch.ones_like(ids)
    model = tiny()
    model(ids, attention_mask=mask, segment_index=number(0))
    mask[1, side] = 0
    with pytest.raises(hea.InputError, match="attention_mask"):
        model(ids, attention_mask=mask, segment_index=number(1))


def test_positions_and_caches_exclude_segments() -> None:
    model, ids = tiny(preset="modern"), random_ids(2, 20)
    cache = model(ids, use_cache=True).past_key_values
    for name, value in {"position_ids": torch.arange(20)[None], CACHE_ARGUMENT: cache}.items():
        with pytest.raises(hea.InputError, match=f"segment_index and {name} exclude each other"):
            model(ids, segment_index=number(0), **{name: value})


def test_text_segments_feed_the_model() -> None:
    """The dataset, the collator and the memory together give every target the context that one pass gives it."""
    model, text = tiny(), random_ids(1, 2 * 61)[0]
    segments = hea.TextSegments(text, num_rows=2, segment_tokens=15)
    loader = torch.utils.data.DataLoader(segments, batch_size=2, collate_fn=hea.SegmentCollator())
    with torch.no_grad():
        losses = [model(**batch).loss for batch in loader]
        logits = model(text.view(2, 61)[:, :60]).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), text.view(2, 61)[:, 1:].flatten())
    torch.testing.assert_close(torch.stack(losses).mean(), expected, atol=1e-5, rtol=1e-5)


def test_a_copied_model_has_a_memory_of_its_own() -> None:
    model, ids = tiny(), random_ids(2, 20)
    model(ids, segment_index=number(0))
    other = copy.deepcopy(model)
    model(ids, segment_index=number(1))
    with torch.no_grad():
        expected = model(ids.repeat(1, 2)).logits[:, 20:]
        actual = other(ids, segment_index=number(1)).logits
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
