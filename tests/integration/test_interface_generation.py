"""`generate` with every cache gives the tokens that are found without one."""

import copy
from typing import Any

import pytest
import torch
import transformers as tr
from attention_models import DECODER, PATTERN, SEQ2SEQS, build, padding, token_ids
from models.shared_checks import check_compiled_steps
from torch import Tensor

import hf_efficient_attn as hea
from hf_efficient_attn.integration.forward_context import CACHE_ARGUMENT, CACHE_NAME
from hf_efficient_attn.patterns import Band, Causal, Full, PerHead, RandomBlocks, Strided

OPTIONS = {"max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
DECODERS = ("llama", "qwen3", "gemma3", "mistral", "gpt2")
CACHES: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"cache_implementation": "static"},
    "beams": {"num_beams": 3},
    "static_beams": {"cache_implementation": "static", "num_beams": 2},
    "chunks": {"prefill_chunk_size": 3},
}


def generated(model: Any, ids: Tensor, mask: Tensor, **options: Any) -> Tensor:
    return model.generate(ids, attention_mask=mask, **OPTIONS, **options)


# one text of two is not padded on the left, either; every cache meets two models
@pytest.mark.parametrize(
    ("name", "cache", "side"),
    [
        pytest.param(name, cache, side, marks=[pytest.mark.thorough] * (side == "none" or (i + j) % 5 > 1))
        for i, name in enumerate(DECODERS)
        for j, cache in enumerate(CACHES)
        for side in ("none", "left")
    ],
)
def test_caches_change_no_token(name: str, cache: str, side: str) -> None:
    model, ids = hea.sparsify(build(name), PATTERN), token_ids(2, 10)
    mask, options = padding(ids, side), CACHES[cache]
    expected = generated(model, ids, mask, use_cache=False, num_beams=options.get("num_beams", 1))
    assert torch.equal(generated(model, ids, mask, **options), expected)


@pytest.mark.parametrize(
    "pattern",
    [
        Causal(),
        Strided(3) | Band(1, 0),
        PerHead([Band(2, 0), Band(5, 0)]),
        RandomBlocks(num_blocks=1, block_tokens=2, seed=0) | Band(2, 0),
        [None, Band(2, 0)],
    ],
    ids=str,
)
def test_caches_change_no_token_of_any_pattern(pattern: Any) -> None:
    model, ids = hea.sparsify(build("llama"), pattern), token_ids(2, 10)
    mask = padding(ids, "left")
    expected = generated(model, ids, mask, use_cache=False)
    for cache in ("dynamic", "static"):
        assert torch.equal(generated(model, ids, mask, **CACHES[cache]), expected)


@pytest.mark.parametrize(
    "pattern", [PATTERN, [None, Band(2, 0)], {"tile": "L", "patterns": {"L": Band(2, 0)}}], ids=str
)
def test_early_exit_changes_no_token(pattern: Any) -> None:
    """Transformers drafts tokens with fewer layers than a list has patterns for."""
    model, ids = hea.sparsify(build("llama"), pattern), token_ids(1, 10)
    found = generated(model, ids, torch.ones_like(ids), assistant_early_exit=1)
    assert torch.equal(found, generated(model, ids, torch.ones_like(ids)))


@pytest.mark.skipif(CACHE_ARGUMENT != CACHE_NAME, reason="older versions fail on layers that have kept nothing")
def test_early_exit_below_the_layers_that_follow_the_pattern() -> None:
    model, ids = hea.sparsify(build("gemma3"), Band(2, 0)), token_ids(1, 10)
    found = generated(model, ids, torch.ones_like(ids), assistant_early_exit=1)
    assert torch.equal(found, generated(model, ids, torch.ones_like(ids)))


@pytest.mark.filterwarnings("ignore:output_attentions=True")
def test_times_of_words() -> None:
    """Transformers writes "eager" into a Whisper's config, for the weights of cross-attention, and leaves it there."""
    sizes = {f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in
             (("layers", 2), ("attention_heads", 4), ("ffn_dim", 48))}  # fmt: skip
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
    lengths = {"max_source_positions": 60, "max_target_positions": 40, "num_mel_bins": 8}
    none = {"suppress_tokens": None, "begin_suppress_tokens": None}
    torch.manual_seed(0)
    model = tr.WhisperForConditionalGeneration(
        tr.WhisperConfig(vocab_size=120, d_model=32, **sizes, **ids, **lengths, **none)
    )
    model.eval()
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    model.generation_config.alignment_heads, model.generation_config.no_timestamps_token_id = [[0, 0], [1, 2]], 80
    sound, options = torch.randn(2, 8, 120), {"max_new_tokens": 6, "do_sample": False}

    def times(of: Any) -> Tensor:
        return of.generate(sound, **options, return_token_timestamps=True, return_timestamps=False)["token_timestamps"]

    expected = times(copy.deepcopy(model))
    hea.sparsify(model, {"encoder": Full(), "decoder": Full()})
    torch.testing.assert_close(times(model), expected)
    hea.sparsify(model, Band(3, 3))
    before = model.generate(sound, **options)
    assert not torch.equal(times(model), expected)
    assert torch.equal(model.generate(sound, **options), before)
    # who chooses it for all calls is told
    model.set_attn_implementation("eager")
    with pytest.raises(hea.UnsupportedBackendError, match="attn_implementation"):
        model.generate(sound, **options)


@pytest.mark.parametrize("cache", ["dynamic", "static", "beams"])
@pytest.mark.parametrize("name", SEQ2SEQS)
def test_encoder_decoders_generate(name: str, cache: str) -> None:
    model, ids = hea.sparsify(build(name), {"encoder": PATTERN, "decoder": PATTERN}), token_ids(2, 10)
    mask, options = padding(ids, "right"), CACHES[cache]
    expected = generated(model, ids, mask, use_cache=False, num_beams=options.get("num_beams", 1))
    assert torch.equal(generated(model, ids, mask, **options), expected)


@pytest.mark.parametrize("pattern", [PATTERN, None])
def test_assisted_decoding(pattern: Any) -> None:
    model, ids = build("llama"), token_ids(1, 10)
    assistant = tr.LlamaForCausalLM(tr.LlamaConfig(**{**DECODER, "num_hidden_layers": 1})).eval()
    for each in (model, assistant):
        each.set_attn_implementation("efficient")
        if pattern is not None:
            hea.sparsify(each, pattern)
    mask = torch.ones_like(ids)
    expected = generated(model, ids, mask, use_cache=False)
    assert torch.equal(generated(model, ids, mask, assistant_model=assistant), expected)
    assert torch.equal(generated(model, ids, mask, prompt_lookup_num_tokens=2), expected)


def test_cached_logits_are_those_of_the_whole_text() -> None:
    model, ids = hea.sparsify(build("gemma3"), PATTERN), token_ids(2, 30)
    mask = padding(ids, "left")
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
        cache = tr.DynamicCache(config=model.config)
        for start, stop in ((0, 11), (11, 12), (12, 20), (20, 30)):
            logits = model(ids[:, start:stop], attention_mask=mask[:, :stop], **{CACHE_ARGUMENT: cache}).logits
            real = mask[:, start:stop].bool()
            torch.testing.assert_close(logits[real], expected[:, start:stop][real], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("pattern", [None, PATTERN])
@pytest.mark.parametrize("side", ["none", "left"])
def test_steps_that_begin_chunks_read_nothing_before_them(side: str, pattern: Any) -> None:
    """Where a table has documents and a cache, the queries' place is said, too: not every key is a query."""
    chunked = {"attention_chunk_size": 4, "layer_types": ["chunked_attention", "full_attention"]}
    config = tr.Llama4TextConfig(**DECODER, **chunked, num_local_experts=2, intermediate_size_mlp=64, head_dim=8)
    torch.manual_seed(0)
    model, ids = tr.Llama4ForCausalLM(config).eval(), token_ids(2, 13)
    model.set_attn_implementation("efficient")
    if pattern is not None:
        hea.sparsify(model, pattern)
    mask, cache = padding(ids, side), tr.DynamicCache(config=config)
    with torch.no_grad():
        expected = model(ids, attention_mask=mask, use_cache=False).logits
        for start, stop in ((0, 6), (6, 7), (7, 8), (8, 9), (9, 11), (11, 12), (12, 13)):
            logits = model(ids[:, start:stop], attention_mask=mask[:, :stop], **{CACHE_ARGUMENT: cache}).logits
            real = mask[:, start:stop].bool()
            torch.testing.assert_close(logits[real], expected[:, start:stop][real], atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:output_attentions=True")
@pytest.mark.parametrize(
    ("name", "need_weights"),
    [
        ("llama", False),
        pytest.param("t5", False, marks=pytest.mark.thorough),
        pytest.param("llama", True, marks=pytest.mark.thorough),
    ],
)
@torch.no_grad()
def test_compiled_steps_in_a_static_cache_compute_what_eager_ones_do(name: str, need_weights: bool) -> None:
    """By all pairs, for the weights of Llama and the position bias of T5."""
    model, ids, others = build(name), token_ids(2, 9), {}
    model.set_attn_implementation("efficient")
    if name == "llama":
        hea.sparsify(model, PATTERN)
        others["attention_mask"] = padding(ids, "left")
    else:
        others["encoder_outputs"] = model.get_encoder()(ids)
    check_compiled_steps(model, ids, need_weights, **others)


def test_paged_decoding_is_refused() -> None:
    model = hea.sparsify(build("llama"), PATTERN)
    with pytest.raises(ValueError, match="efficient"):
        model.generate_batch([[3, 4, 5]], tr.GenerationConfig(max_new_tokens=2, pad_token_id=0, eos_token_id=2))
