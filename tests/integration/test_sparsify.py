"""`sparsify`: records a pattern, keeps it in saved models, restores, and tries a model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tr
from attention_models import BART, CONFIGS, PATTERN, SEQ2SEQ, TINY, WIDE, build, inputs_of, outputs_of, token_ids

import hf_efficient_attn as hea
from hf_efficient_attn.integration.trial import takes_tables
from hf_efficient_attn.patterns import Band, Full


def test_the_pattern_is_recorded_and_the_model_returned() -> None:
    model = build("llama")
    assert hea.sparsify(model, PATTERN) is model
    assert model.config.attention_pattern == PATTERN.to_dict()
    assert model.config._attn_implementation == "efficient"
    # each part of the model can be asked for what it computes
    assert model.model.config.attention_pattern == PATTERN.to_dict()


@pytest.mark.parametrize(
    ("name", "auto"),
    [
        ("llama", tr.AutoModelForCausalLM),
        ("gemma3", tr.AutoModelForCausalLM),
        ("bert", tr.AutoModelForMaskedLM),
        ("bart", tr.AutoModelForSeq2SeqLM),
        ("t5", tr.AutoModelForSeq2SeqLM),
    ],
)
def test_a_model_saved_again_before_its_first_forward_keeps_its_pattern(name: str, auto: Any, tmp_path: Path) -> None:
    inputs = inputs_of(name, "left")
    model = hea.sparsify(build(name), PATTERN)
    expected = outputs_of(model, inputs)
    # the last of them over itself
    for turn in (0, 1, 1):
        model.save_pretrained(tmp_path / str(turn))
        model = auto.from_pretrained(tmp_path / str(turn))
    torch.testing.assert_close(outputs_of(model.eval(), inputs), expected)
    config = tr.AutoConfig.from_pretrained(tmp_path / "0")
    assert config._attn_implementation == "efficient"
    config.save_pretrained(tmp_path / "config")
    assert json.loads((tmp_path / "config" / "config.json").read_text())["attn_implementation"] == "hf_efficient_attn"
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


def test_patterns_differ_from_layer_to_layer() -> None:
    model, inputs = build("llama"), inputs_of("llama", "none")
    own = outputs_of(model, inputs)
    mixed = outputs_of(hea.sparsify(model, [None, Band(2, 0)]), inputs)
    tiled = {"tile": "AB", "patterns": {"A": None, "B": Band(2, 0)}}
    assert torch.equal(outputs_of(hea.sparsify(model, tiled), inputs), mixed)
    assert torch.allclose(outputs_of(hea.sparsify(model, [None, None]), inputs), own, atol=1e-5)
    assert not torch.allclose(mixed, own, atol=1e-2)


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
