"""Masks that transformers or a user gives to models on "efficient": packing, matrices, windows; what is refused."""

import inspect
import itertools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformers as tr
from attention_models import CAUSAL as DECODERS
from attention_models import DECODER, PATTERN, build, inputs_of, matrix, outputs_of, padding, token_ids
from models_cases import checkpoint_activations, switch_off_dropout
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask

import hf_efficient_attn as hea
from hf_efficient_attn.attention.build_call import _laid_out, warn_of_keyless
from hf_efficient_attn.attention.dispatch import _plans
from hf_efficient_attn.integration.forward_context import CACHE_ARGUMENT
from hf_efficient_attn.integration.names import BIDIRECTIONAL, CAUSAL, has_rows, table_kind
from hf_efficient_attn.messages import warn_once
from hf_efficient_attn.patterns import Band, BlockTopK, Dilated, GlobalTokens, PerHead

TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}


@pytest.mark.parametrize("pattern", [None, PATTERN])
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3"])
def test_packed_documents_are_computed_as_if_alone(name: str, pattern: Any) -> None:
    model = build(name)
    model.set_attn_implementation("efficient")
    if pattern is not None:
        hea.sparsify(model, pattern)
    documents = [token_ids(1, length, seed=length) for length in (7, 1, 12)]
    positions = torch.cat([torch.arange(ids.shape[1]) for ids in documents])[None]
    with torch.no_grad():
        packed = model(torch.cat(documents, 1), position_ids=positions, use_cache=False).logits
        alone = torch.cat([model(ids).logits for ids in documents], 1)
    torch.testing.assert_close(packed, alone, **TOLERANCE)


def marks_of(mask: torch.Tensor) -> torch.Tensor:
    """Return global tokens, others in each of two examples, none of them padding."""
    marks = torch.zeros_like(mask)
    marks[0, [4, 9]] = marks[1, 7] = 1
    return marks


# the patterns take turns
MARKED = [
    # of two sides each
    pytest.param(
        *(name, side, (Band(4, 0), Band(2, 1), PerHead([Band(4, 0), Band(1, 0)] * 2))[(number + turn) % 3]),
        marks=[pytest.mark.thorough] * (turn == number % 3),
    )
    for number, name in enumerate(("llama", "gpt2", "bert", "roberta"))
    for turn, side in enumerate(("none", "left", "right"))
]


@pytest.mark.parametrize(("name", "side", "pattern"), MARKED)
def test_marked_tokens_are_global_as_in_longformer(name: str, side: str, pattern: Any) -> None:
    """They read, and are read by, everything; in a decoder, all that lies before. Compared with a dense mask."""
    model, inputs = build(name).double(), inputs_of(name, side)
    mask = inputs["attention_mask"]
    marks, index = marks_of(mask), torch.arange(mask.shape[1])
    heads = torch.cat([matrix(each, mask) for each in pattern.heads(4)], 1)
    joined = (marks[:, None, :, None] | marks[:, None, None, :]).bool() & mask.bool()[:, None, None]
    allowed = heads | (joined & mask.bool()[:, None, :, None])
    if name in DECODERS:
        allowed = allowed & (index <= index[:, None])
    with torch.no_grad():
        expected = model(**{**inputs, "attention_mask": allowed}).logits[mask.bool()]
    hea.sparsify(model, pattern)
    actual = outputs_of(model, {**inputs, "global_attention_mask": marks})
    torch.testing.assert_close(actual, expected, **TOLERANCE)
    assert (actual - outputs_of(model, inputs)).abs().max() > 1e-2
    if name in DECODERS:
        steps, cache, cuts = [], tr.DynamicCache(config=model.config), (0, 8, 9, 14)
        for first, stop in itertools.pairwise(cuts):
            given = {key: each[:, :stop] for key, each in {**inputs, "global_attention_mask": marks}.items()}
            given["input_ids"] = inputs["input_ids"][:, first:stop]
            with torch.no_grad():
                steps.append(model(**given, **{CACHE_ARGUMENT: cache}).logits)
        torch.testing.assert_close(torch.cat(steps, 1)[mask.bool()], actual, **TOLERANCE)


def test_marked_tokens_reach_compiled_and_recomputed_layers() -> None:
    model, inputs = hea.sparsify(build("roberta"), Band(4, 0)), inputs_of("roberta", "left")
    inputs["global_attention_mask"] = marks_of(inputs["attention_mask"])
    compiled: Any = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(outputs_of(compiled, inputs), outputs_of(model, inputs), **TOLERANCE)
    parameters = [model.roberta.encoder.layer[0].attention.self.query.weight]
    (expected,) = torch.autograd.grad(model(**inputs).logits.square().sum(), parameters)
    switch_off_dropout(model)
    checkpoint_activations(model.train())
    (actual,) = torch.autograd.grad(model(**inputs).logits.square().sum(), parameters)
    torch.testing.assert_close(actual, expected)


def test_marked_tokens_of_an_encoder_decoder_are_its_encoders() -> None:
    model, inputs = build("bart"), inputs_of("bart", "none")
    marks = torch.zeros_like(inputs["input_ids"]).index_fill_(1, torch.tensor([0, 9]), 1)
    expected = outputs_of(hea.sparsify(model, Band(3, 0) | GlobalTokens([0, 9])), inputs)
    actual = outputs_of(hea.sparsify(model, Band(3, 0)), {**inputs, "global_attention_mask": marks})
    torch.testing.assert_close(actual, expected, **TOLERANCE)
    with pytest.raises(hea.InputError, match="global_attention_mask"):
        outputs_of(
            hea.sparsify(model, {"encoder": None, "decoder": Band(3, 0)}), {**inputs, "global_attention_mask": marks}
        )


@torch.no_grad()
def test_layers_that_are_compiled_by_themselves_take_marks_at_every_call() -> None:
    torch.compiler.reset()
    model, ids = hea.sparsify(build("llama"), Band(3, 0)), token_ids(2, 9)
    marks = torch.zeros_like(ids)
    marks[:, 2] = 1
    expected = model(ids, global_attention_mask=marks, use_cache=False).logits
    model = hea.sparsify(build("llama"), Band(3, 0))
    for layer in model.model.layers:
        layer.compile(backend="eager")
    for _ in range(3):
        found = model(ids, global_attention_mask=marks, use_cache=False).logits
        torch.testing.assert_close(found, expected, **TOLERANCE)


def test_marks_that_would_change_nothing_are_refused() -> None:
    # its layers drop what they do not know
    model = tr.StableLmModel(tr.StableLmConfig(**{**DECODER, "num_key_value_heads": 4})).eval()
    inputs = inputs_of("llama", "right")
    marks = marks_of(inputs["attention_mask"])
    with pytest.raises(hea.InputError, match="global_attention_mask"):
        hea.sparsify(model, Band(3, 0))(**inputs, global_attention_mask=marks)
    model = hea.sparsify(build("llama"), Band(3, 0))
    for wrong in (marks[:, :-1], marks[:1], 2 * marks, 1 - inputs["attention_mask"], marks.tolist()):
        with pytest.raises(hea.InputError, match="global_attention_mask"):
            model(**inputs, global_attention_mask=wrong)
    hea.sparsify(model, BlockTopK(4, 1))
    with pytest.raises(hea.InputError, match="global_attention_mask"):
        model(**inputs, global_attention_mask=marks)


@pytest.mark.parametrize("window", [1, 2, 5, 40])
@pytest.mark.parametrize("name", ["mistral_sliding", "modernbert"])
def test_own_windows_of_every_width(name: str, window: int) -> None:
    model = build(name)
    field = {"local_attention": 2 * window} if name == "modernbert" else {"sliding_window": window}
    config = type(model.config)(**{**model.config.to_dict(), **field, "layer_types": None})
    model = type(model)(config).eval()
    inputs = inputs_of(name, "left", tokens=20)
    expected = outputs_of(model, inputs)
    model.set_attn_implementation("efficient")
    torch.testing.assert_close(outputs_of(model, inputs), expected, **TOLERANCE)


def test_chunked_attention_is_documents() -> None:
    chunked = {"attention_chunk_size": 4, "layer_types": ["chunked_attention", "full_attention"]}
    experts = {"num_local_experts": 2, "intermediate_size_mlp": 64, "head_dim": 8}
    config = tr.Llama4TextConfig(**DECODER, **experts, **chunked)
    model = tr.Llama4ForCausalLM(config).eval()
    inputs = {"input_ids": token_ids(2, 11), "attention_mask": padding(token_ids(2, 11), "left")}
    expected = outputs_of(model, inputs)
    model.set_attn_implementation("efficient")
    torch.testing.assert_close(outputs_of(model, inputs), expected, **TOLERANCE)


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_a_matrix_is_obeyed_and_cut_by_the_pattern(name: str, kind: str) -> None:
    model, ids = build(name), token_ids(2, 9)
    allowed = torch.rand(2, 1, 9, 9, generator=torch.Generator().manual_seed(0)) < 0.5
    allowed |= torch.eye(9, dtype=torch.bool)
    allowed = allowed.tril() if name == "llama" else allowed
    positions = torch.arange(9)
    pattern = PATTERN.causal() if name == "llama" else PATTERN
    both = allowed & pattern.allowed(positions[:, None], positions)

    def given(mask: torch.Tensor) -> torch.Tensor:
        return mask if kind == "bool" else torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)

    own, cut = (outputs_of(model, {"input_ids": ids, "attention_mask": given(mask)}) for mask in (allowed, both))
    model.set_attn_implementation("efficient")
    inputs = {"input_ids": ids, "attention_mask": given(allowed)}
    torch.testing.assert_close(outputs_of(model, inputs), own, **TOLERANCE)
    torch.testing.assert_close(outputs_of(hea.sparsify(model, PATTERN), inputs), cut, **TOLERANCE)


def test_a_matrix_that_allows_later_tokens_is_refused_under_a_causal_pattern() -> None:
    model, ids = hea.sparsify(build("llama"), "full()"), token_ids(2, 9)
    causal = torch.ones(9, 9, dtype=torch.bool).tril()
    prefix, left, real = causal.clone(), causal.clone(), causal.clone()
    prefix[:, :4] = True
    # rows of padding that allow everything, or all that is not padding
    left[:, :3], left[:3] = False, True
    real[:3], real[:, :3] = True, False
    nothing = torch.ones_like(causal)
    for mask, is_refused in ((causal, False), (left, False), (real, False), (nothing, False), (prefix, True)):
        with pytest.raises(hea.InputError, match="later") if is_refused else nullcontext():
            model(ids, attention_mask=mask[None, None].expand(2, 1, -1, -1))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_masks_are_compiled_for_cpus(name: str) -> None:
    """By torch's own compiler, which other tests leave out: it pastes messages of assertions into C++."""
    model, ids = hea.sparsify(build(name), PATTERN), token_ids(2, 20)
    compiled: Any = torch.compile(model)
    with torch.no_grad():
        found, expected = (each(ids, use_cache=False).logits for each in (compiled, model))
    torch.testing.assert_close(found, expected, **TOLERANCE)


def test_masks_that_do_not_fit_are_refused() -> None:
    for name in ("llama", "bert"):
        model, ids = hea.sparsify(build(name), PATTERN), token_ids(2, 9)
        for mask in (torch.ones(2, 1, 9, 8).bool(), torch.ones(2, 3, 9, 9).bool(), torch.ones(2, 1, 9, 9).long()):
            with pytest.raises(hea.InputError, match="attention_mask has"):
                model(ids, attention_mask=mask)
        for mask in (padding(ids[:, :7], "left"), torch.ones(2, 1, 9)):
            with pytest.raises(hea.InputError, match="mask"):
                model(ids, attention_mask=mask)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_a_row_of_padding_alone_is_finite(name: str) -> None:
    model, ids = hea.sparsify(build(name), PATTERN).train(), token_ids(2, 9)
    mask = torch.ones_like(ids)
    mask[0] = 0
    logits = model(ids, attention_mask=mask).logits
    logits.sum().backward()
    assert torch.isfinite(logits).all()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters() if parameter.grad is not None)


def test_masks_that_no_pattern_of_positions_expresses_are_refused() -> None:
    config = build("llama").config
    config._attn_implementation = "efficient"
    embeddings, ids = torch.zeros(1, 9, 32), torch.tensor([[-1, 0, 0, 0, -1, -1, 1, 1, -1]])
    with pytest.raises(hea.UnsupportedBackendError, match="image tokens"):
        create_causal_mask(config, embeddings, None, None, block_sequence_ids=ids)
    with pytest.raises(hea.UnsupportedBackendError, match="image tokens"):
        create_causal_mask(config, embeddings, None, None, or_mask_function=lambda b, h, q, kv: kv < 4)
    with pytest.raises(hea.UnsupportedBackendError, match="image tokens"):
        create_causal_mask(config, embeddings, None, None, and_mask_function=lambda b, h, q, kv: (q - kv) % 2 == 0)


def test_an_overlay_that_cuts_documents_is_read() -> None:
    config = build("llama").config
    config._attn_implementation = "efficient"
    documents = torch.tensor([[0, 0, 0, 1, 1, 2], [0, 1, 1, 1, 1, 1]])
    overlay = lambda b, h, q, kv: documents[b, q] == documents[b, kv]  # noqa: E731
    table = create_causal_mask(config, torch.zeros(2, 6, 32), None, None, and_mask_function=overlay)
    assert table.shape[2:] == (3, 6)
    assert (table[:, 0, 2] - 1).tolist() == documents.tolist()


def test_nothing_masked_is_a_table_without_rows_that_tells_its_kind() -> None:
    config = build("llama").config
    config._attn_implementation = "efficient"
    for mask in (None, torch.ones(1, 6)):
        for create, kind in ((create_causal_mask, CAUSAL), (create_bidirectional_mask, BIDIRECTIONAL)):
            table = create(config, torch.zeros(1, 6, 32), mask, **{CACHE_ARGUMENT: None})
            assert not has_rows(table)
            assert table_kind(table) == kind


def test_a_matrix_of_a_static_cache_is_refused_under_a_pattern() -> None:
    """Where its queries stand is not known: they would be taken for the last places of the cache, which are empty."""
    model, ids = hea.sparsify(build("llama"), Band(3, 0)), token_ids(2, 6)
    matrix = torch.ones(2, 1, 6, 9, dtype=torch.bool).tril()
    for mask in (matrix, torch.zeros(2, 1, 6, 9).masked_fill(~matrix, torch.finfo(torch.float32).min)):
        cache = tr.StaticCache(config=model.config, max_cache_len=9)
        with pytest.raises(hea.InputError, match="none of them attends to the last key"):
            model(ids, attention_mask=mask, **{CACHE_ARGUMENT: cache})


def test_a_matrix_that_may_be_a_decoders_own_mask_is_refused_under_its_pattern() -> None:
    """Decoders such as NLLB-MoE's have is_causal=False on their own attention, like on their cross-attention."""
    model = hea.sparsify(build("bart"), {"decoder": PATTERN})
    layer = model.model.decoder.layers[0].self_attn
    layer.is_causal = False
    ids = token_ids(2, 6)
    matrix = torch.ones(2, 1, 6, 6).tril().bool()
    model(**inputs_of("bart", "right"))
    with pytest.raises(hea.UnsupportedBackendError, match="unknown whether it belongs to"):
        model(input_ids=ids, decoder_input_ids=ids, decoder_attention_mask=matrix)


def test_a_table_cannot_be_added_to_scores() -> None:
    config = build("llama").config
    config._attn_implementation = "efficient"
    for tokens in range(1, 5):
        for mask in (None, padding(token_ids(2, 6), "left")[:, :tokens]):
            table = create_causal_mask(config, torch.zeros(2, tokens, 32), mask, None)
            with pytest.raises(RuntimeError, match="must match"):
                torch.zeros(2, 4, tokens, tokens) + table


def test_prefixes_of_an_encoder_are_refused() -> None:
    model = hea.sparsify(build("bert"), PATTERN)
    layer = model.bert.encoder.layer[0].attention.self
    states = torch.zeros(1, 4, 5, 8)
    forward = tr.AttentionInterface()["efficient"]
    with pytest.raises(hea.UnsupportedBackendError, match="5 queries and 7 keys"):
        forward(layer, states, torch.zeros(1, 4, 7, 8), torch.zeros(1, 4, 7, 8), None)


@pytest.mark.parametrize("num_queries", [5, 7, 9])
def test_cross_attention_reads_every_token(num_queries: int) -> None:
    """Also where nothing but the shapes tells that it is cross-attention, and the padding is that of the keys."""
    layer = build("bert").bert.encoder.layer[0].attention.self
    query, key, value = (torch.randn(2, 4, tokens, 8) for tokens in (num_queries, 7, 7))
    config = layer.config
    config._attn_implementation = "efficient"
    mask = padding(token_ids(2, 7), "right")
    states = {"inputs_embeds": torch.zeros(2, num_queries, 32), "encoder_hidden_states": torch.zeros(2, 7, 32)}
    table = create_bidirectional_mask(config, attention_mask=mask, **states)
    out, _ = tr.AttentionInterface()["efficient"](layer, query, key, value, table)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask.bool()[:, None, None])
    torch.testing.assert_close(out.transpose(1, 2), expected, **TOLERANCE)


def test_the_first_token_without_keys_is_named_once() -> None:
    warn_once.cache_clear()
    _laid_out.cache_clear()
    _plans.clear()
    warn_of_keyless.cache_clear()
    model = hea.sparsify(build("llama"), Dilated(left=4, right=-1, step=2) | GlobalTokens([1], attends_to_all=False))
    with pytest.warns(UserWarning, match="the first at position 0"):
        model(token_ids(1, 9))
    # pytest turns a second warning into an error
    model(token_ids(1, 9))


def test_inference_mode_and_changed_masks() -> None:
    model = hea.sparsify(build("llama"), PATTERN).eval()
    ids = token_ids(2, 14)
    mask = padding(ids, "left")
    for _ in range(2):
        with torch.no_grad():
            expected = model(ids, attention_mask=mask).logits
        with torch.inference_mode():
            torch.testing.assert_close(model(ids, attention_mask=mask).logits, expected)
        mask[1, :9] = 0


def test_arguments_stand_in_the_order_of_transformers_own_functions() -> None:
    """Models may give them by position; those of "efficient" that have a place have the place they have there."""
    functions = tr.AttentionInterface()
    for ours, theirs in (("efficient", "sdpa"), ("efficient", "flash_attention_2")):
        own, other = (list(inspect.signature(functions[name]).parameters.values()) for name in (ours, theirs))
        places = [each for each in own if each.kind is not inspect.Parameter.VAR_KEYWORD]
        assert [(each.name, each.default) for each in places] == [
            (each.name, each.default) for each in other[: len(places)]
        ]
    masks = tr.AttentionMaskInterface()
    own, other = (list(inspect.signature(masks[name]).parameters)[:-1] for name in ("efficient", "sdpa"))
    assert own[:8] == other[:8]


@pytest.mark.parametrize("name", ["llama", "bert", "t5"])
def test_padding_masks_of_another_batch_are_refused(name: str) -> None:
    model, inputs = hea.sparsify(build(name), PATTERN), inputs_of(name, "none")
    for rows in (1, 3):
        with pytest.raises(hea.InputError, match="the batch has 2 rows"):
            model(**{**inputs, "attention_mask": torch.ones(rows, inputs["input_ids"].shape[1])})
