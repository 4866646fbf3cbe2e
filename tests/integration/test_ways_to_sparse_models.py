"""A model with a pattern is checked in the same way however it came to be: sparsified, loaded, built, or switched."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tr
from attention_models import CONFIGS, DECODER, PATTERN, SEQ2SEQ, TINY, WIDE, build, inputs_of, outputs_of, token_ids

import hf_efficient_attn as hea
from hf_efficient_attn.integration import guard as guard_module
from hf_efficient_attn.integration.forward_context import CACHE_ARGUMENT
from hf_efficient_attn.patterns import Band

POSITIONS = torch.cat([torch.arange(length) for length in (5, 7, 2)])[None]
ESM = {**TINY, "pad_token_id": 0, "mask_token_id": 3, "position_embedding_type": "rotary"}


def loaded(model: Any, folder: Path, **options: Any) -> Any:
    hea.sparsify(model, PATTERN).save_pretrained(folder)
    return type(model).from_pretrained(folder, **options)


def built(model: Any, folder: Path) -> Any:
    again = type(model)(copy.deepcopy(hea.sparsify(model, PATTERN).config))
    again.load_state_dict(model.state_dict())
    return again


def switched(model: Any, folder: Path) -> Any:
    """Write the pattern into the config by hand, as one that was built on another attention has none of our hooks."""
    sparse = copy.deepcopy(hea.sparsify(copy.deepcopy(model), PATTERN).config)
    model.config.attention_pattern = sparse.attention_pattern
    model.set_attn_implementation("efficient")
    return model


WAYS: dict[str, Callable[[Any, Path], Any]] = {
    "sparsified": lambda model, _: hea.sparsify(model, PATTERN),
    "loaded": loaded,
    "built": built,
    "switched": switched,
}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Any], Any]:
    """Return a function that gives a model its pattern."""
    return lambda model: WAYS[request.param](model, tmp_path).eval()


def esm() -> Any:
    return tr.EsmForMaskedLM(tr.EsmConfig(**ESM)).eval()


@torch.no_grad()
def test_documents_that_a_model_does_not_hand_on_are_warned_of(way: Callable[[Any], Any]) -> None:
    for model in (build("modernbert"), esm()):
        sparse, ids = way(model), token_ids(1, 14)
        with pytest.warns(UserWarning, match="Also pass seq_idx"):
            sparse(ids, position_ids=POSITIONS)


@torch.no_grad()
def test_positions_given_by_place_are_seen(way: Callable[[Any], Any]) -> None:
    sparse = way(build("bert"))
    with pytest.warns(UserWarning, match="Also pass seq_idx"):
        sparse(token_ids(1, 14), None, None, POSITIONS)


def test_another_implementation_is_refused(way: Callable[[Any], Any]) -> None:
    model = way(build("llama"))
    for part in (model, model.model):
        for implementation in ("sdpa", "eager", "vllm"):
            model.config._attn_implementation = implementation
            with pytest.raises(hea.UnsupportedBackendError, match=f"attn_implementation is '{implementation}'"):
                part(token_ids(1, 4))
        model.set_attn_implementation("efficient")
        part(token_ids(1, 4))


def test_context_parallelism_is_not_offered(way: Callable[[Any], Any]) -> None:
    model = way(build("llama"))
    assert model._supports_context_parallel is False
    hea.sparsify(model, None)
    # older versions of transformers have no such flag
    if hasattr(tr.LlamaModel, "_supports_context_parallel"):
        assert model._supports_context_parallel is tr.LlamaModel._supports_context_parallel


@pytest.mark.parametrize(
    "name", ["gpt2", "t5", "vit", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("llama", "bert"))]
)
def test_no_examples_and_no_tokens_are_refused(name: str, way: Callable[[Any], Any]) -> None:
    model, inputs = way(build(name)), inputs_of(name, "none")
    for nothing in (lambda each: each[:0], lambda each: each[:, :0]):
        for left_out in ((), ("attention_mask",)):
            empty = {key: nothing(each) for key, each in inputs.items() if key not in left_out}
            with pytest.raises(hea.InputError, match="There are no tokens"):
                model(**empty)
            with pytest.raises(hea.InputError, match="There are no tokens"):
                model(*list(empty.values())[:1])
    if name == "gpt2":
        ids = inputs["input_ids"]
        cache = model(ids, use_cache=True).past_key_values
        with pytest.raises(hea.InputError, match="If a cache holds the whole text already, pass a new one"):
            model(ids[:, :0], **{CACHE_ARGUMENT: cache})
    if "decoder_input_ids" in inputs:
        with pytest.raises(hea.InputError, match="decoder_input_ids"):
            model(**{**inputs, "decoder_input_ids": inputs["decoder_input_ids"][:, :0]})


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_padding_masks_hold_0_and_1(name: str, way: Callable[[Any], Any]) -> None:
    model, inputs = way(build(name)), inputs_of(name, "none")
    for value in (2, -1, 0.5, float("nan")):
        mask = inputs["attention_mask"].to(torch.tensor(value).dtype)
        mask[1, 0] = value
        for arguments, options in (((), {**inputs, "attention_mask": mask}), ((inputs["input_ids"], mask), {})):
            with pytest.raises(hea.InputError, match=f"attention_mask holds {value}"):
                model(*arguments, **options)


@pytest.mark.parametrize("name", ["llama", "bart", "t5"])
def test_a_loaded_model_is_tried_once(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs, tried = loaded(build(name), tmp_path).eval(), inputs_of(name, "left"), []
    original = guard_module.try_model
    monkeypatch.setattr(guard_module, "try_model", lambda *each: tried.append(each) or original(*each))
    if name in ("bart", "t5"):
        # as `generate` does
        model.get_encoder()(inputs["input_ids"])
        assert len(tried) == 1
        tried.clear()
    for _ in range(2):
        outputs_of(model, inputs)
    assert len(tried) == 1


@pytest.mark.parametrize("part", ["encoder", "decoder"])
def test_parts_are_checked_when_they_are_called_alone(part: str, tmp_path: Path) -> None:
    model = hea.sparsify(build("bart"), {part: PATTERN})
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    ids = token_ids(1, 6)
    found = again.generate(ids, max_new_tokens=3, do_sample=False)
    assert torch.equal(found, model.generate(ids, max_new_tokens=3, do_sample=False))


DENSE = {name: value for name, value in WIDE.items() if name != "num_attention_heads"}
SPANS = {**TINY, "pad_token_id": 0, "span": "adaptive", "span_limit": 9, "span_ramp": 3}
# what `sparsify` refuses, with a pattern in the config
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "interface nowhere": (lambda: tr.FNetConfig(**DENSE, vocab_size=61), "no layer of its encoder calls it"),
    "no interface": (lambda: tr.LongformerConfig(**TINY), "hf_efficient_attn.convert"),
    "masks": (lambda: tr.DogeConfig(**DECODER), "uses attention masks itself"),
    "sliding": (lambda: tr.MistralConfig(**DECODER, sliding_window=5), "sliding_window to None"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_pattern_that_was_written_into_a_config_is_refused(what: str) -> None:
    make, message = REFUSED[what]
    config = make()
    config.attention_pattern = Band(2, 0).to_dict()
    model = tr.AutoModel.from_config(config, attn_implementation="efficient").eval()
    for _ in range(2):
        with pytest.raises((hea.UnsupportedBackendError, hea.ConfigurationError), match=message):
            model(token_ids(1, 4))


@pytest.mark.parametrize(
    "config",
    [hea.SimplifiedTransformerConfig(**SPANS), hea.AdaptiveSpanConfig(**{**TINY, "span_limit": 9, "span_ramp": 3})],
    ids=["some heads", "all heads"],
)
def test_no_model_with_spans_is_built_with_a_pattern(config: Any) -> None:
    config.attention_pattern = Band(2, 0).to_dict()
    with pytest.raises(hea.ConfigurationError, match="has span='adaptive'"):
        tr.AutoModel.from_config(config, attn_implementation="efficient")


def test_a_pattern_where_no_layer_reads_it_is_refused() -> None:
    text = tr.LlamaConfig(**DECODER)
    vision = tr.SiglipVisionConfig(**WIDE, image_size=16, patch_size=4)
    config = tr.LlavaConfig(text_config=text, vision_config=vision, image_token_index=60)
    config.attention_pattern = PATTERN.to_dict()
    model = tr.LlavaForConditionalGeneration(config)
    model.set_attn_implementation("efficient")
    with pytest.raises(hea.ConfigurationError, match="LlavaConfig"):
        model(token_ids(1, 4))


def test_what_no_trial_can_tell_is_refused_after_the_first_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard_module, "try_model", lambda *_: False)
    config = tr.LongT5Config(**SEQ2SEQ, num_layers=2, num_heads=4, d_kv=8, d_ff=64)
    config.attention_pattern = {"encoder": PATTERN.to_dict(), "decoder": None}
    model = tr.LongT5Model._from_config(config, attn_implementation="efficient").eval()
    for called in (model.get_encoder(), model):
        with pytest.raises(hea.UnsupportedBackendError, match="attention_pattern"):
            called(input_ids=token_ids(1, 4))


def test_a_loaded_model_on_another_attention_is_refused(tmp_path: Path) -> None:
    model = loaded(build("llama"), tmp_path, attn_implementation="sdpa")
    with pytest.raises(hea.UnsupportedBackendError, match="attn_implementation"):
        model(token_ids(1, 4))
    hea.sparsify(model, None)(token_ids(1, 4))


def test_models_without_a_pattern_are_left_alone() -> None:
    """Those of transformers on their own attention, and ours, which check their inputs themselves."""
    for model in (build("llama"), tr.AutoModel.from_config(CONFIGS["bart"]())):
        assert not any(module._forward_pre_hooks for module in model.modules())
    ours = hea.SimplifiedTransformerModel(hea.SimplifiedTransformerConfig(**{**TINY, "pad_token_id": 0}))
    assert not any(module._forward_pre_hooks for module in ours.modules())
