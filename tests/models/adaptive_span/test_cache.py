"""Generation holds of every layer what its heads can read, and gives the tokens that a full cache gives."""

from typing import Any

import pytest
import torch
import transformers
from models.adaptive_span.tiny_models import SPANS, random_ids, tiny

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


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
@pytest.mark.parametrize("padding", [0, 5])
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
    [({"spans": [[0.0, 0.0, 0.0, 39.0]] * 2}, 40), ({"span": "dynamic"}, 40), ({"span": "fixed"}, 40)],
)
def test_a_layer_holds_no_more_than_the_limit(fields: dict[str, Any], length: int) -> None:
    cache = generate(tiny(**fields), random_ids(2, 50)).past_key_values
    assert [layer.keys.shape[2] for layer in cache.layers] == [length, length]


def test_nothing_is_kept_where_tokens_read_only_themselves() -> None:
    cache = generate(tiny(**CASES["itself"]), random_ids(2, 9)).past_key_values
    assert [layer.keys.shape[2] for layer in cache.layers] == [0, 0]


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


def test_a_cache_that_is_asked_for_is_used() -> None:
    """A static one has room behind the queries, which are then not the last of the keys."""
    model, ids = tiny(), random_ids(2, 20)
    generated = generate(model, ids, cache_implementation="static")
    assert isinstance(generated.past_key_values, transformers.StaticCache)
    assert torch.equal(generated.sequences, full(model, ids))


def test_no_cache_at_all() -> None:
    model, ids = tiny(), random_ids(2, 20)
    assert torch.equal(generate(model, ids, use_cache=False).sequences, full(model, ids))


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
        expected, cache, parts = model(ids, use_cache=False).logits, SpanCache(model), []
        for part in ids.split(13, 1):
            parts.append(model(part, **{CACHE_ARGUMENT: cache}).logits)
    torch.testing.assert_close(torch.cat(parts, 1), expected, atol=1e-5, rtol=1e-5)


def test_bfloat16_holds_the_same_tokens() -> None:
    model, ids = tiny(spans=[[0.3, 3.5, 12.0, 0.0], [0.0, 20.2, 1.25, 7.0]]).to(torch.bfloat16), random_ids(2, 40)
    cache = generate(model, ids).past_key_values
    assert [layer.keys.shape[2] for layer in cache.layers] == [16, 25]
    assert cache.layers[0].keys.dtype == torch.bfloat16


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
