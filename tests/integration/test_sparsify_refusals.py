"""What `sparsify` refuses: patterns, models that could not follow them, and other implementations afterwards."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tr
from attention_models import BART, DECODER, PATTERN, SEQ2SEQ, TINY, WIDE, build, inputs_of, token_ids

import hf_efficient_attn as hea
from hf_efficient_attn.integration import trial
from hf_efficient_attn.patterns import (
    Band,
    BlockTopK,
    CompressedKeys,
    GlobalTokens,
    Pattern,
    PerHead,
    RandomBlocks,
    SpanTree,
    bigbird,
)

# in their causal form, too
LENGTH_DEPENDENT = [SpanTree(2), Band(3, 0) | GlobalTokens([-1]), bigbird(4, 1), bigbird(4, 1, plan="authors")]
LENGTH_DEPENDENT += [RandomBlocks(1, 4, exclude=GlobalTokens([-1]))]


@pytest.mark.parametrize(
    ("name", "pattern", "message"),
    [
        ("llama", {"kind": "bnad", "left": 1, "right": 0}, "Did you mean 'band'"),
        ("llama", {"kind": "band", "left": -7, "right": 0}, "left is -7"),
        ("llama", [Band(2, 0)], "1 patterns for 2 layers"),
        ("llama", 7, "is 7"),
        ("llama", "band(64", "pattern"),
        ("llama", Band, "pattern"),
        ("llama", torch.ones(2), "pattern"),
        ("llama", {"encoder": Band(2, 0)}, "not an encoder-decoder"),
        ("llama", [Band(2, 0), PerHead([Band(2, 0)] * 3)], "per_head"),
        ("llama", {0: Band(2, 0)}, "give a list"),
        ("mistral_sliding", Band(2, 0), "sliding_window to None"),
        ("llama", CompressedKeys(4, 2) | Band(3, 0), "for self-attention"),
        ("gemma3", [Band(2, 0), Band(2, 0)], "Give None for this layer"),
        ("bert", BlockTopK(4, 2), "no token would attend to later ones"),
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
    with pytest.raises(hea.UnsupportedBackendError, match="LongformerModel.*convert"):
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
            "combines two models",
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


def test_what_no_trial_can_tell_is_refused_after_the_first_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "takes_tables", lambda *_: False)
    model = hea.sparsify(tr.FNetModel(tr.FNetConfig(**DENSE, vocab_size=61)).eval(), PATTERN)
    for _ in range(2):
        with pytest.raises(hea.UnsupportedBackendError, match="attention_pattern"):
            model(token_ids(1, 4))
    hea.sparsify(model, None)
    model(token_ids(1, 4))
    bart = hea.sparsify(build("bart"), {"decoder": PATTERN})
    bart(**inputs_of("bart", "none"))


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_a_pattern_whose_class_is_not_imported_is_refused_at_loading(name: str, tmp_path: Path) -> None:
    model = hea.sparsify(build(name), Band(2, 0))
    model.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace('"band"', '"my_band"'))
    with pytest.raises(hea.ConfigurationError, match="my_band"):
        type(model).from_pretrained(tmp_path)


def test_plain_models_that_use_masks_themselves_are_refused() -> None:
    model = tr.DogeForCausalLM(tr.DogeConfig(**DECODER)).eval()
    model.set_attn_implementation("efficient")
    for _ in range(2):
        with pytest.raises(hea.UnsupportedBackendError, match="uses attention masks itself"):
            model(token_ids(1, 4))


def test_context_parallelism_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.tensor.experimental._context_parallel import _attention

    model = hea.sparsify(build("llama"), PATTERN)
    assert model._supports_context_parallel is False
    monkeypatch.setattr(_attention, "_replaced_functions", {"scaled_dot_product_attention": None})
    with pytest.raises(hea.UnsupportedBackendError, match="Context parallelism"):
        model(token_ids(1, 4))


def test_configs_without_a_layer_for_a_pattern_are_refused() -> None:
    mamba = tr.MambaConfig(vocab_size=9, hidden_size=32, num_hidden_layers=1)
    gemma = tr.Gemma3TextConfig(**TINY, layer_types=["sliding_attention"] * 2)
    for config, cure in ((mamba, "with full attention"), (gemma, "Set entries of config.layer_types")):
        with pytest.raises(hea.ConfigurationError, match=cure):
            hea.sparsify(config, Band(2, 2))


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


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            hea.StarTransformerConfig(hidden_size=8, num_attention_heads=2),
            "tokens of a star attend to their neighbours",
        ),
        (hea.BPTransformerConfig(hidden_size=8, num_attention_heads=2), "tokens and spans of a BP-Transformer"),
        (hea.BPSeq2SeqConfig(hidden_size=8, num_attention_heads=2), "tokens and spans of a BP-Transformer"),
    ],
    ids=["star", "bp", "bp_seq2seq"],
)
def test_a_family_with_a_pattern_of_its_own_follows_no_other(config: Any, said: str) -> None:
    with torch.device("meta"):
        model = tr.AutoModel.from_config(config)
    for given in (config, model):
        with pytest.raises(hea.ConfigurationError, match=said):
            hea.sparsify(given, Band(1, 1))
    assert getattr(model.config, "attention_pattern", None) is None
