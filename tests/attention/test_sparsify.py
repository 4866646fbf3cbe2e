"""`sparsify`: records, checks, restores, and keeps a model from computing without its pattern."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tr
from attention_models import (
    BART,
    CONFIGS,
    DECODER,
    PATTERN,
    SEQ2SEQ,
    TINY,
    WIDE,
    build,
    inputs_of,
    outputs_of,
    token_ids,
)

import hf_efficient_attn as hea
from hf_efficient_attn.attention import trial
from hf_efficient_attn.attention.trial import takes_tables
from hf_efficient_attn.patterns import Band, Full, GlobalTokens, Pattern, RandomBlocks, SpanTree, bigbird

# in their causal form, too
LENGTH_DEPENDENT = [SpanTree(2), Band(3, 0) | GlobalTokens([-1]), bigbird(4, 1), bigbird(4, 1, plan="authors")]
LENGTH_DEPENDENT += [RandomBlocks(1, 4, exclude=GlobalTokens([-1]))]


def test_the_pattern_is_recorded_and_the_model_returned() -> None:
    model = build("llama")
    assert hea.sparsify(model, PATTERN) is model
    assert model.config.attention_pattern == PATTERN.to_dict()
    assert model.config._attn_implementation == "efficient"
    # each part of the model can be asked for what it computes
    assert model.model.config.attention_pattern == PATTERN.to_dict()


@pytest.mark.parametrize(
    ("name", "auto"),
    [("llama", tr.AutoModelForCausalLM), ("bert", tr.AutoModelForMaskedLM), ("t5", tr.AutoModelForSeq2SeqLM)],
)
def test_a_model_saved_again_before_its_first_forward_keeps_its_pattern(name: str, auto: Any, tmp_path: Path) -> None:
    inputs = inputs_of(name, "left")
    model = hea.sparsify(build(name), PATTERN)
    expected = outputs_of(model, inputs)
    for turn in range(3):
        model.save_pretrained(tmp_path / str(turn))
        model = auto.from_pretrained(tmp_path / str(turn))
    torch.testing.assert_close(outputs_of(model.eval(), inputs), expected)
    tr.AutoConfig.from_pretrained(tmp_path / "0").save_pretrained(tmp_path / "config")
    assert json.loads((tmp_path / "config" / "config.json").read_text())["attn_implementation"] == "efficient"
    hea.sparsify(model, None).save_pretrained(tmp_path / "restored")
    assert "attn_implementation" not in json.loads((tmp_path / "restored" / "config.json").read_text())


def test_another_pattern_replaces_the_first_and_none_restores() -> None:
    model, inputs = build("llama"), inputs_of("llama", "left")
    before, own = model.config.to_dict(), outputs_of(model, inputs)
    first = outputs_of(hea.sparsify(model, Band(1, 0)), inputs)
    second = outputs_of(hea.sparsify(model, PATTERN), inputs)
    assert not torch.allclose(first, second, atol=1e-2)
    assert torch.equal(outputs_of(hea.sparsify(model, Band(1, 0)), inputs), first)
    hea.sparsify(model, None)
    assert model.config._attn_implementation == "sdpa"
    assert model.config.to_dict() == before
    assert torch.equal(outputs_of(model, inputs), own)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_none_restores_the_implementation(implementation: str) -> None:
    model = build("bert", attn_implementation=implementation)
    hea.sparsify(hea.sparsify(hea.sparsify(model, PATTERN), Full()), None)
    assert model.config._attn_implementation == implementation
    # nothing to restore
    assert hea.sparsify(model, None).config._attn_implementation == implementation
    config = CONFIGS["bert"]()
    config._attn_implementation = implementation
    assert hea.sparsify(hea.sparsify(config, PATTERN), None)._attn_implementation == implementation


def test_a_config_makes_sparse_models() -> None:
    config = hea.sparsify(CONFIGS["llama"](), PATTERN)
    model = tr.AutoModelForCausalLM.from_config(config).eval()
    assert model.config._attn_implementation == "efficient"
    expected = outputs_of(model, inputs_of("llama", "none"))
    hea.sparsify(model, None)
    assert not torch.allclose(outputs_of(model, inputs_of("llama", "none")), expected, atol=1e-6)


@pytest.mark.parametrize("name", ["llama", "bert", "gemma3", "bart"])
def test_saved_twice_it_is_still_sparse(name: str, tmp_path: Path) -> None:
    model = hea.sparsify(build(name), PATTERN)
    for _ in range(3):
        model.save_pretrained(tmp_path)
        assert json.loads((tmp_path / "config.json").read_text())["attention_pattern"]
        model = type(model).from_pretrained(tmp_path)
        assert model.config._attn_implementation == "efficient"
        outputs_of(model, inputs_of(name, "none"))


def test_patterns_differ_from_layer_to_layer() -> None:
    model, inputs = build("llama"), inputs_of("llama", "none")
    own = outputs_of(model, inputs)
    mixed = outputs_of(hea.sparsify(model, [None, Band(2, 0)]), inputs)
    tiled = {"tile": "AB", "patterns": {"A": None, "B": Band(2, 0)}}
    assert torch.equal(outputs_of(hea.sparsify(model, tiled), inputs), mixed)
    assert torch.allclose(outputs_of(hea.sparsify(model, [None, None]), inputs), own, atol=1e-5)
    assert not torch.allclose(mixed, own, atol=1e-2)


@pytest.mark.parametrize(
    ("name", "pattern", "message"),
    [
        ("llama", {"kind": "bnad", "left": 1, "right": 0}, "Did you mean 'band'"),
        ("llama", {"kind": "band", "left": -7, "right": 0}, "left is -7"),
        ("llama", [Band(2, 0)], "1 patterns for 2 layers"),
        ("llama", 7, "is 7"),
        ("llama", {"encoder": Band(2, 0)}, "no encoder-decoder"),
        ("llama", {0: Band(2, 0)}, "give a list"),
        ("mistral_sliding", Band(2, 0), "sliding_window to None"),
        ("gemma3", [Band(2, 0), Band(2, 0)], "Give None for this layer"),
    ],
)
def test_bad_patterns_are_refused_before_anything_changes(name: str, pattern: Any, message: str) -> None:
    model = build(name)
    before = model.config.to_dict()
    with pytest.raises(hea.ConfigurationError, match=message):
        hea.sparsify(model, pattern)
    assert model.config.to_dict() == before
    assert model.config._attn_implementation == "sdpa"


def test_models_without_the_interface_are_refused() -> None:
    config = tr.LongformerConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, vocab_size=61)
    with pytest.raises(hea.UnsupportedBackendError, match="LongformerModel does not use the attention interface"):
        hea.sparsify(tr.LongformerModel(config), PATTERN)
    with pytest.raises(hea.ConfigurationError, match="not Linear"):
        hea.sparsify(torch.nn.Linear(2, 2), PATTERN)  # type: ignore[type-var]


DENSE = {name: value for name, value in WIDE.items() if name != "num_attention_heads"}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (tr.FNetConfig(**DENSE, vocab_size=61), "no layer of its encoder calls it"),
        (tr.LongT5Config(**SEQ2SEQ, num_layers=2, num_heads=4, d_kv=8, d_ff=64), "no layer of its encoder calls it"),
        (tr.DogeConfig(**DECODER), "uses attention masks itself"),
        (tr.BigBirdPegasusConfig(**SEQ2SEQ, **BART), "uses attention masks itself"),
        (tr.PegasusXConfig(**SEQ2SEQ, **BART, block_size=4, num_global_tokens=2), "no layer of its encoder calls it"),
        (
            tr.EncoderDecoderConfig.from_encoder_decoder_configs(tr.BertConfig(**TINY), tr.BertConfig(**TINY)),
            "joins two models",
        ),
    ],
    ids=lambda each: each.model_type if isinstance(each, tr.PreTrainedConfig) else "",
)
def test_what_could_not_follow_is_refused_before_anything_changes(config: Any, message: str) -> None:
    """By a trial without numbers; of a config alone, too."""
    model_class = tr.MODEL_MAPPING.get(type(config), tr.EncoderDecoderModel)
    before = config.to_dict()
    for each in (config, model_class(config)):
        with pytest.raises((hea.UnsupportedBackendError, hea.ConfigurationError), match=message):
            hea.sparsify(each, PATTERN)
        assert (each if each is config else each.config).to_dict() == before


def classifier_of(kind: str) -> Any:
    """Return a classifier of pictures whose config has a text part that it does not compute."""
    text = {**WIDE, "vocab_size": 61, "max_position_embeddings": 16, "bos_token_id": 1, "eos_token_id": 2}
    parts = {"text_config": text, "vision_config": {**WIDE, "image_size": 16, "patch_size": 4}}
    return getattr(tr, f"{kind}ForImageClassification")(getattr(tr, f"{kind}Config")(**parts))


@pytest.mark.parametrize("kind", ["CLIP", "Siglip", "MetaClip2"])
def test_classifiers_that_do_not_compute_the_part_with_the_pattern_are_refused(kind: str) -> None:
    model = classifier_of(kind)
    with pytest.raises(hea.UnsupportedBackendError, match="no layer of its encoder calls it"):
        hea.sparsify(model, PATTERN)
    assert getattr(model.config.text_config, "attention_pattern", None) is None


SPEECH = {**SEQ2SEQ, **BART, "bos_token_id": 1, "decoder_start_token_id": 1, "max_source_positions": 30}
AUDIO = {"num_mel_bins": 8, "suppress_tokens": None, "begin_suppress_tokens": None}


@pytest.mark.parametrize(
    ("model_class", "config"),
    [
        (tr.CLIPModel, tr.CLIPConfig(text_config=TINY, vision_config={**WIDE, "image_size": 16, "patch_size": 4})),
        (tr.MoonshineModel, tr.MoonshineConfig(hidden_size=32, intermediate_size=64, vocab_size=61)),
        (tr.Blip2QFormerModel, tr.Blip2QFormerConfig(**TINY, encoder_hidden_size=32)),
        (tr.WhisperForConditionalGeneration, tr.WhisperConfig(**SPEECH, **AUDIO)),
        (tr.Wav2Vec2Model, tr.Wav2Vec2Config(**WIDE)),
        (tr.Speech2TextModel, tr.Speech2TextConfig(**SPEECH, input_feat_per_channel=8)),
        (tr.ASTModel, tr.ASTConfig(**WIDE, max_length=32, num_mel_bins=16, patch_size=4)),
    ],
    ids=lambda each: each.__name__ if isinstance(each, type) else "",
)
def test_models_are_tried_whatever_they_read(model_class: Any, config: Any) -> None:
    """Pictures, spectrograms, waves, embeddings: what will be refused is refused at once."""
    assert takes_tables(model_class, config)


def test_what_no_trial_can_tell_is_refused_after_the_first_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "takes_tables", lambda *_: False)
    model = hea.sparsify(tr.FNetModel(tr.FNetConfig(**DENSE, vocab_size=61)).eval(), PATTERN)
    for _ in range(2):
        with pytest.raises(hea.UnsupportedBackendError, match="has computed without its attention_pattern"):
            model(token_ids(1, 4))
    hea.sparsify(model, None)
    model(token_ids(1, 4))
    bart = hea.sparsify(build("bart"), {"decoder": PATTERN})
    bart(**inputs_of("bart", "none"))


def test_plain_models_that_use_masks_themselves_are_refused() -> None:
    model = tr.DogeForCausalLM(tr.DogeConfig(**DECODER)).eval()
    model.set_attn_implementation("efficient")
    for _ in range(2):
        with pytest.raises(hea.UnsupportedBackendError, match="uses attention masks itself"):
            model(token_ids(1, 4))


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "vllm", "sglang"])
def test_another_implementation_is_refused(implementation: str) -> None:
    model = hea.sparsify(build("llama"), PATTERN)
    model.config._attn_implementation = implementation
    for part in (model, model.model):
        with pytest.raises(hea.UnsupportedBackendError, match=f"attn_implementation is '{implementation}'"):
            part(token_ids(1, 4))
    model.set_attn_implementation("efficient")
    model(token_ids(1, 4))


def test_context_parallelism_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.tensor.experimental._context_parallel import _attention

    model = hea.sparsify(build("llama"), PATTERN)
    assert model._supports_context_parallel is False
    monkeypatch.setattr(_attention, "_replaced_functions", {"scaled_dot_product_attention": None})
    with pytest.raises(hea.UnsupportedBackendError, match="Context parallelism"):
        model(token_ids(1, 4))


def test_of_a_composite_model_the_text_part_is_sparse() -> None:
    vision = tr.SiglipVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, image_size=16, patch_size=4
    )
    config = tr.Gemma3Config(text_config=CONFIGS["gemma3"]().to_dict(), vision_config=vision, mm_tokens_per_image=4)
    model = hea.sparsify(tr.Gemma3ForConditionalGeneration(config).eval(), PATTERN)
    assert model.config.text_config.attention_pattern == PATTERN.to_dict()
    assert getattr(model.config.vision_config, "attention_pattern", None) is None
    text = outputs_of(model, {"input_ids": token_ids(1, 12)})
    assert torch.isfinite(text).all()


def test_refusals_say_what_to_do() -> None:
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32}
    bigbird = tr.BigBirdModel(tr.BigBirdConfig(vocab_size=9, **small))
    with pytest.raises(hea.UnsupportedBackendError, match="convert"):
        hea.sparsify(bigbird, Band(2, 2))
    mamba = tr.MambaConfig(vocab_size=9, hidden_size=32, num_hidden_layers=1)
    gemma = tr.Gemma3TextConfig(**small, layer_types=["sliding_attention"])
    mistral = tr.MistralConfig(**small, sliding_window=4)
    cures = (
        (mamba, "with layers of full"),
        (gemma, "entries of config.layer_types"),
        (mistral, "sliding_window to None"),
    )
    for config, cure in cures:
        with pytest.raises(hea.ConfigurationError, match=cure):
            hea.sparsify(config, Band(2, 2))
    for pattern in ("band(64, 0)", Band, torch.ones(2), 3):
        with pytest.raises(hea.ConfigurationError, match="parse_pattern reads a text"):
            hea.sparsify(tr.LlamaConfig(**small), pattern)


@pytest.mark.parametrize("pattern", LENGTH_DEPENDENT, ids=lambda pattern: pattern.kind)
def test_causal_models_have_no_pattern_that_depends_on_the_length(pattern: Pattern) -> None:
    """A token would read other tokens as the text grows: refused at once, and not where a cache first meets it."""
    model = build("llama")
    with pytest.raises(
        hea.ConfigurationError, match=r"depends on the length.*In (?:a )?causal (?:model|layers).*bigbird\(\.\.\."
    ):
        hea.sparsify(model, pattern)
    assert not hasattr(model.config, "attention_pattern")
    with pytest.raises(hea.ConfigurationError, match="depends on the length"):
        hea.SparseTransformerConfig(is_causal=True, attention_pattern=pattern)
    with pytest.raises(hea.ConfigurationError, match="depends on the length"):
        hea.SparseSeq2SeqConfig(attention_pattern={"encoder": None, "decoder": pattern})
    # who reads both sides may have it
    hea.SparseTransformerConfig(attention_pattern=pattern)
    hea.SparseSeq2SeqConfig(attention_pattern=pattern)
    hea.sparsify(build("bert"), pattern)
