"""What layers remember: caches hold what heads can read, and segments read what came before."""

import copy
from typing import Any

import pytest
import torch
import transformers
from models.adaptive_span.tiny_models import SPANS, random_ids, set_spans, tiny
from models.shared_checks import decode
from models_cases import checkpoint_activations

import hf_efficient_attn as hea
from hf_efficient_attn.integration.forward_context import CACHE_ARGUMENT
from hf_efficient_attn.models.spans.memory import SpanCache, kept_tokens
from hf_efficient_attn.models.spans.module import span_modules

OPTIONS = {"max_new_tokens": 30, "min_new_tokens": 30, "do_sample": False, "return_dict_in_generate": True}
CASES = {
    "relative keys": {},
    "rotary": {"preset": "modern"},
    "short": {"preset": "modern", "spans": [[0.0, 2.5, 1.0, 0.0], [5.0, 0.0, 0.0, 0.0]]},
    # each token reads only itself: nothing is kept
    "itself": {"preset": "modern", "spans": [[0.0] * 4] * 2, "span_ramp": 1},
    "dynamic": {"span": "dynamic"},
    "fixed": {"span": "fixed"},
    "frozen": {"frozen_spans": SPANS, "span_penalty": 0.0},
    "long ramp": {"span_ramp": 64},
}


def generate(model: Any, ids: torch.Tensor, **options: Any) -> Any:
    options.setdefault("attention_mask", torch.ones_like(ids))
    return model.generate(ids, **{**OPTIONS, **options})


def full(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    """Return the tokens generated with a cache that holds everything."""
    cache = transformers.DynamicCache(config=model.config)
    generated = generate(model, ids, **{CACHE_ARGUMENT: cache}, **options)
    assert type(generated.past_key_values) is transformers.DynamicCache
    return generated.sequences


@pytest.mark.parametrize(
    ("padding", "options"),
    [pytest.param(0, {}, marks=pytest.mark.thorough), (5, {"num_beams": 3})],
    ids=["greedy", "padded, beams"],
)
@pytest.mark.parametrize("fields", CASES.values(), ids=CASES)
def test_small_cache_gives_what_a_full_one_gives(fields: dict[str, Any], padding: int, options: dict[str, Any]) -> None:
    model, ids = tiny(**fields), random_ids(2, 30)
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    generated = generate(model, ids, attention_mask=mask, **options)
    assert isinstance(generated.past_key_values, SpanCache)
    assert torch.equal(generated.sequences, full(model, ids, attention_mask=mask, **options))


def test_a_layer_holds_its_longest_span_and_ramp() -> None:
    """The spec's test 10: per layer; without itself a token reads ⌈z⌉ + R tokens before it, with itself one less."""
    spans = [[0.0, 3.5, 12.0, 0.0], [0.0, 20.25, 1.25, 7.0]]
    for preset, lengths in (("enwik8_demo", [16, 25]), ("modern", [15, 24])):
        model = tiny(preset=preset, spans=spans)
        cache = generate(model, random_ids(2, 40)).past_key_values
        assert [layer.keys.shape[2] for layer in cache.layers] == lengths
        assert [kept_tokens(module, model.config) for module in span_modules(model)] == lengths
        assert cache.get_seq_length() == 69


@pytest.mark.parametrize(
    ("fields", "length"),
    [
        ({"spans": [[0.0, 0.0, 0.0, 39.0]] * 2}, 40),
        ({"span": "dynamic"}, 40),
        ({"span": "fixed"}, 40),
        (CASES["itself"], 0),
    ],
)
def test_a_layer_holds_no_more_than_the_limit(fields: dict[str, Any], length: int) -> None:
    cache = generate(tiny(**fields), random_ids(2, 50)).past_key_values
    assert [layer.keys.shape[2] for layer in cache.layers] == [length, length]


def test_tokens_that_may_be_taken_back_stay() -> None:
    """Assisted decoding and prompt lookup take back what was refused; a small cache could not."""
    model, ids = tiny(), random_ids(1, 20)
    for options in ({"assistant_model": tiny(spans=[[0.0] * 4] * 2)}, {"prompt_lookup_num_tokens": 3}):
        generated = generate(model, ids, **options)
        assert not isinstance(generated.past_key_values, SpanCache)
        assert torch.equal(generated.sequences, full(model, ids))


def test_padding_behind_a_text_needs_the_full_cache() -> None:
    model, ids = tiny(), random_ids(2, 20)
    mask = torch.ones_like(ids)
    mask[1, -4:] = 0
    generated = generate(model, ids, attention_mask=mask)
    assert not isinstance(generated.past_key_values, SpanCache)
    assert torch.equal(generated.sequences, full(model, ids, attention_mask=mask))


def test_a_conversation_goes_on_with_its_cache() -> None:
    model, ids = tiny(preset="modern"), random_ids(1, 20)
    first = generate(model, ids)
    longer = torch.cat((first.sequences, random_ids(1, 6, seed=4)), 1)
    second = generate(model, longer, **{CACHE_ARGUMENT: first.past_key_values})
    assert isinstance(second.past_key_values, SpanCache)
    assert torch.equal(second.sequences, full(model, longer))


def test_prompt_in_chunks() -> None:
    model, ids = tiny(), random_ids(2, 50)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        found, _ = decode(model, ids, [13, 13, 13, 11], SpanCache(model))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:output_attentions")
def test_weights_of_cached_steps_have_a_column_for_every_key() -> None:
    # groups of heads that reach differently far; transformers caches hold everything
    model = tiny(spans=[[0.0, 40.0, 64.0, 3.0]] * 2, span_limit=128, preset="modern")
    ids = random_ids(1, 100)
    with torch.no_grad():
        full_weights = model(ids, output_attentions=True, use_cache=False).attentions
        cache = model(ids[:, :90], use_cache=True).past_key_values
        steps = model(ids[:, 90:], **{CACHE_ARGUMENT: cache}, output_attentions=True).attentions
    for whole, step in zip(full_weights, steps, strict=True):
        torch.testing.assert_close(step, whole[:, :, 90:], atol=1e-6, rtol=1e-5)


def number(index: int, rows: int = 2) -> torch.Tensor:
    return torch.full((rows,), index)


def by_segments(model: Any, ids: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return the logits [B, T, vocab_size] of a text read in segments of so many tokens."""
    segments = ids.split(tokens, 1)
    return torch.cat([model(part, segment_index=number(index)).logits for index, part in enumerate(segments)], 1)


@pytest.mark.parametrize("tokens", [7, 90])
@pytest.mark.parametrize("fields", CASES.values(), ids=CASES)
def test_segments_equal_one_long_pass(fields: dict[str, Any], tokens: int) -> None:
    """The spec's test 7, with segments shorter and longer than the spans, and a last one that is shorter."""
    model, ids = tiny(**fields), random_ids(2, 129)
    with torch.no_grad():
        expected = model(ids).logits
        torch.testing.assert_close(by_segments(model, ids, tokens), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_other_kernels_remember(kernel: str) -> None:
    model, ids = tiny(), random_ids(2, 70)
    model.set_attn_implementation(kernel)
    with torch.no_grad():
        torch.testing.assert_close(by_segments(model, ids, 20), model(ids).logits, atol=1e-5, rtol=1e-5)


def test_only_what_spans_can_read_is_kept() -> None:
    """The longest span of a layer, its ramp, and 64 tokens by which spans can grow, but never beyond the limit."""
    model = tiny(span_limit=200, spans=[[0.0, 3.5, 12.0, 0.0], [0.0, 150.0, 0.0, 0.0]])
    for index in range(9):
        model(random_ids(2, 30), segment_index=number(index))
        lengths = [states.shape[1] for states in model.model.memory.open(number(index + 1), False, 2).memories]
        seen = 30 * (index + 1)
        assert lengths == [min(seen, 12 + 4 + 64), min(seen, 200)]


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
    with pytest.raises(hea.InputError, match=rf"segment_index={index} of 2 rows, but the last one was 1,.*in order"):
        model(ids, segment_index=number(index))


@pytest.mark.parametrize("shape", [(), (2, 1), (3,)])
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


def test_a_copied_model_has_a_memory_of_its_own() -> None:
    model, ids = tiny(), random_ids(2, 20)
    model(ids, segment_index=number(0))
    other = copy.deepcopy(model)
    model(ids, segment_index=number(1))
    with torch.no_grad():
        expected = model(ids.repeat(1, 2)).logits[:, 20:]
        actual = other(ids, segment_index=number(1)).logits
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
