"""PatternCache: the same tokens from a memory that does not grow."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from attention_models import build, padding, token_ids

import hf_efficient_attn as hea
from hf_efficient_attn.integration.forward_context import CACHE_ARGUMENT
from hf_efficient_attn.integration.pattern_cache import readable_tokens
from hf_efficient_attn.messages import warn_once
from hf_efficient_attn.patterns import Band, BlockLocal, Causal, Dilated, Full, GlobalTokens, Pattern, PerHead, Strided

OPTIONS = {"max_new_tokens": 14, "min_new_tokens": 14, "do_sample": False, "pad_token_id": 0}
# a pattern, and how many keys it needs
KEPT: list[tuple[Pattern, int]] = [
    (Band(3, 0), 3),
    (Band(0, 0), 0),
    (Band(4, 7) | GlobalTokens([0, 1]), 6),
    (GlobalTokens([0], attends_to_all=False) | Band(1, 0), 2),
    (PerHead([Dilated(4, 0, 2) & Band(9, 3), Band(2, 0) | GlobalTokens([0])]), 10),
]
WAYS: list[dict[str, Any]] = [{}, {"num_beams": 3}, {"prefill_chunk_size": 4}]


def generated() -> Iterator[Any]:
    """Yield every model, side of padding, pattern and way.

    Llama, padded on the left, which leaves one row as it is, meets all of them. Of other models the ways take turns,
    and the models, too; no padding at all is one case.
    """
    for name, side in itertools.product(("llama", "gemma3", "gpt2"), ("left", "none")):
        for (number, kept), (turn, way) in itertools.product(enumerate(KEPT), enumerate(WAYS)):
            is_often = (number + turn) % 3 == 0 and (name, side) == (("gemma3", "gpt2")[number % 2], "left")
            is_often = is_often or (name, side, number, turn) == ("llama", "none", 2, 0)
            is_thorough = not is_often and (name, side) != ("llama", "left")
            yield pytest.param(name, side, *kept, way, marks=[pytest.mark.thorough] * is_thorough)


@pytest.mark.parametrize(("name", "side", "pattern", "num_kept", "options"), [*generated()], ids=str)
def test_same_tokens_from_constant_memory(
    name: str, side: str, pattern: Pattern, num_kept: int, options: dict[str, Any]
) -> None:
    model, ids = hea.sparsify(build(name), pattern), token_ids(3, 9)
    mask, beams = padding(ids, side), options.get("num_beams", 1)
    expected = model.generate(ids, attention_mask=mask, use_cache=False, num_beams=beams, **OPTIONS)
    cache = hea.PatternCache(model.config)
    actual = model.generate(ids, attention_mask=mask, **{CACHE_ARGUMENT: cache}, **options, **OPTIONS)
    assert torch.equal(actual, expected)
    # the second layer of each follows the pattern, also where the first is sliding
    assert cache.layers[1].keys.shape[2] == cache.layers[1].values.shape[2] == num_kept
    assert cache.get_seq_length() == 9 + 13


def test_layers_keep_what_they_need() -> None:
    model, ids = hea.sparsify(build("llama"), [Band(3, 0) | GlobalTokens([0]), None]), token_ids(2, 12)
    mask = padding(ids, "left")
    warn_once.cache_clear()
    with pytest.warns(UserWarning, match="bounds 1 of 2 layers.* such as layer 1"):
        cache = hea.PatternCache(model)
    assert repr(cache) == "PatternCache(1 of 2 layers bounded, layers=[PatternLayer, DynamicLayer])"
    expected = model.generate(ids, attention_mask=mask, use_cache=False, **OPTIONS)
    assert torch.equal(model.generate(ids, attention_mask=mask, **{CACHE_ARGUMENT: cache}, **OPTIONS), expected)
    assert [layer.keys.shape[2] for layer in cache.layers] == [4, 25]


WIDE, NARROW = "band(9, 0) | global(0)", "band(3, 0) | global(0)"
TINY = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "head_dim": 8}
TINY |= {"num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GEMMA = {
    **TINY,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"] * 2,
    "sliding_window": 6,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": 64,
    "hidden_size_per_layer_input": 8,
}
LINEAR = {f"linear_{name}": 8 for name in ("key_head_dim", "value_head_dim")}
LINEAR |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}


@pytest.mark.filterwarnings("ignore:This PatternCache bounds")
@pytest.mark.parametrize(
    ("config_class", "fields", "pattern"),
    [
        # upper layers use the keys of layer 3
        ("Gemma3nTextConfig", {"activation_sparsity_pattern": [0.0] * 6}, [None, NARROW, None, NARROW, WIDE, NARROW]),
        ("Gemma4TextConfig", {}, [None, NARROW, None, NARROW, NARROW, None]),
        # layers without keys
        ("Lfm2Config", {"layer_types": ["conv", "full_attention", "full_attention"]}, NARROW),
        ("Qwen3_5TextConfig", {**LINEAR, "layer_types": ["linear_attention", "full_attention"]}, NARROW),
    ],
    ids=["gemma3n", "gemma4", "lfm2", "qwen3_5"],
)
def test_layers_that_share_keys_or_have_none(config_class: str, fields: dict[str, Any], pattern: Any) -> None:
    if not hasattr(transformers, config_class):
        pytest.skip(f"this version of transformers has no {config_class}")
    shape = GEMMA if config_class.startswith("Gemma") else {**TINY, "num_hidden_layers": len(fields["layer_types"])}
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**shape, **fields)
    model, ids = transformers.AutoModelForCausalLM.from_config(config).eval(), token_ids(2, 30)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        expected = hea.sparsify(model, pattern)(ids, use_cache=False).logits
        cache = hea.PatternCache(model)
        parts = [model(part, **{CACHE_ARGUMENT: cache}, use_cache=True).logits for part in ids.split([12, 1, 1, 16], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), expected, atol=1e-4, rtol=1e-4)
    if "num_kv_shared_layers" in shape:
        with pytest.raises(hea.ConfigurationError, match="use the keys of layers below"):
            hea.PatternCache(model, positions="cache")


@pytest.mark.skipif(not hasattr(transformers, "DoryConfig"), reason="this version of transformers has no Dory")
def test_layers_that_run_several_times_have_one_pattern() -> None:
    layers = {"num_hidden_layers": 4, "n_input_layers": 1, "n_output_layers": 1, "layer_types": ["full_attention"] * 4}
    model = transformers.AutoModelForCausalLM.from_config(transformers.DoryConfig(**TINY, **layers))
    with pytest.raises(hea.ConfigurationError, match="dory runs its layers several times"):
        hea.PatternCache(hea.sparsify(model, [NARROW, None, NARROW, NARROW]))


def test_rows_of_very_different_lengths() -> None:
    """A row may hold fewer tokens than the cache keeps, at the start of decoding and for a while after."""
    model, ids = hea.sparsify(build("llama"), Band(5, 0) | GlobalTokens([0, 1, 2])), token_ids(3, 12)
    mask = torch.ones_like(ids)
    mask[0, :11] = 0
    mask[1, :6] = 0
    expected = model.generate(ids, attention_mask=mask, use_cache=False, **OPTIONS)
    cache = hea.PatternCache(model.config)
    assert torch.equal(model.generate(ids, attention_mask=mask, **{CACHE_ARGUMENT: cache}, **OPTIONS), expected)


def test_a_cache_can_be_used_again_after_reset() -> None:
    model = hea.sparsify(build("llama"), Band(3, 0))
    cache = hea.PatternCache(model.config)
    ids = token_ids(2, 8)
    first = model.generate(ids, attention_mask=padding(ids, "left"), **{CACHE_ARGUMENT: cache}, **OPTIONS)
    cache.reset()
    again = model.generate(ids, attention_mask=padding(ids, "left"), **{CACHE_ARGUMENT: cache}, **OPTIONS)
    assert torch.equal(first, again)


@pytest.mark.parametrize(
    "pattern",
    [Strided(3), Strided(3) & GlobalTokens([0]), BlockLocal(4), GlobalTokens([1]) | Band(2, 0), ~Band(2, 0)],
    ids=str,
)
def test_patterns_that_read_more_are_refused(pattern: Pattern) -> None:
    model = hea.sparsify(build("llama"), pattern)
    with pytest.raises(hea.ConfigurationError, match="band and first tokens"):
        hea.PatternCache(model.config)


def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(hea.ConfigurationError, match="sparsify"):
        hea.PatternCache(build("llama").config)
    with pytest.raises(hea.ConfigurationError, match="encoder-decoder"):
        hea.PatternCache(hea.sparsify(build("bart"), Band(2, 0)).config)
    model, ids = hea.sparsify(build("llama"), Band(2, 0)), token_ids(1, 8)
    with pytest.raises(hea.UnsupportedBackendError, match="cannot remove tokens"):
        model.generate(ids, **{CACHE_ARGUMENT: hea.PatternCache(model.config)}, prompt_lookup_num_tokens=2, **OPTIONS)
    mask = torch.tensor([[1, 1, 1, 0, 0, 1, 1, 1]])
    with pytest.raises(hea.InputError, match="left"):
        model.generate(ids, attention_mask=mask, **{CACHE_ARGUMENT: hea.PatternCache(model.config)}, **OPTIONS)


def test_full_patterns_keep_everything() -> None:
    for pattern in (Causal(), Full(), Band(None, 0), Band(2, 0) | Causal()):
        assert readable_tokens(pattern.causal()) == (0, None)
        model = hea.sparsify(build("llama"), pattern)
        assert type(hea.PatternCache(model.config).layers[0]).__name__ == "DynamicLayer"


@pytest.mark.parametrize("made_for", [Band(3, 0), Band(3, 0) | GlobalTokens([0, 1, 2, 3, 4])], ids=str)
def test_caches_of_narrower_patterns_are_refused(made_for: Pattern) -> None:
    """The second keeps as many keys as the model reads, but others."""
    ids = token_ids(1, 9)
    cache = hea.PatternCache(hea.sparsify(build("llama"), made_for).config)
    model = hea.sparsify(build("llama"), Band(8, 0))
    with pytest.raises(hea.ConfigurationError, match="Make a new PatternCache"):
        model.generate(ids, **{CACHE_ARGUMENT: cache}, **OPTIONS)
    with pytest.raises(hea.ConfigurationError, match="attends to all tokens"):
        build("llama", attn_implementation="efficient").generate(ids, **{CACHE_ARGUMENT: cache}, **OPTIONS)
    wide = hea.PatternCache(hea.sparsify(build("llama"), Band(9, 0) | GlobalTokens([0])).config)
    expected = model.generate(ids, **OPTIONS)
    assert torch.equal(model.generate(ids, **{CACHE_ARGUMENT: wide}, **OPTIONS), expected)


@pytest.mark.parametrize("names", [("llama", "llama"), ("gpt2", "gpt2"), ("llama", "gemma3")], ids=str)
def test_dense_models_are_refused_once_tokens_are_dropped(names: tuple[str, str]) -> None:
    """Also those that had a pattern before."""
    model, ids = hea.sparsify(build(names[0]), Band(3, 0)), token_ids(2, 9)
    cache, dense = hea.PatternCache(model.config), build(names[1])
    assert dense.config._attn_implementation == "sdpa"
    expected = dense(ids).logits
    # from an empty cache it reads all tokens
    assert torch.equal(dense(ids, **{CACHE_ARGUMENT: cache}).logits, expected)
    for attempt in range(2):
        for mask in (None, torch.ones(2, 1, 1, 4, dtype=torch.bool)):
            with pytest.raises(hea.UnsupportedBackendError, match="has seen 9 tokens in layer 0"):
                dense(ids[:, -1:], attention_mask=mask, **{CACHE_ARGUMENT: cache})
        cache.reset()
        if attempt == 0:
            model(ids, **{CACHE_ARGUMENT: cache})


@torch.no_grad()
def test_other_caches_are_refused_by_compiled_models_and_by_deeper_ones() -> None:
    wide, narrow = (hea.sparsify(build("llama"), Band(left, 0)) for left in (6, 3))
    step = torch.compile(wide, backend="eager")
    with pytest.raises(hea.ConfigurationError, match="PatternCache"):
        step(token_ids(1, 9), **{CACHE_ARGUMENT: hea.PatternCache(narrow.config)})
    torch.compiler.reset()
    cache = hea.PatternCache(narrow.config)
    del cache.layers[1:]
    with pytest.raises(hea.ConfigurationError, match="has 1 layers, but the model has 2"):
        wide(token_ids(1, 9), **{CACHE_ARGUMENT: cache})


def test_a_cache_is_made_for_a_model_or_its_config() -> None:
    model = hea.sparsify(build("llama"), Band(3, 0))
    assert repr(hea.PatternCache(model)) == repr(hea.PatternCache(model.config))
    for other in (build("llama"), torch.nn.Linear(2, 2), None, "gpt2"):
        with pytest.raises(hea.ConfigurationError, match="PatternCache"):
            hea.PatternCache(other)  # type: ignore[arg-type]
