"""Every field of every config, given nonsense or numbers out of range: accepted, or refused in a sentence."""

import dataclasses
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from huggingface_hub.errors import StrictDataclassError, StrictDataclassFieldValidationError
from transformers import AutoConfig, AutoModel, PreTrainedConfig

import hf_efficient_attn as hea
from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.models.config.fields import own_fields

CONFIGS = [
    config
    for config in vars(hea).values()
    if isinstance(config, type) and issubclass(config, PreTrainedConfig) and config.__module__.startswith(hea.__name__)
]
# for what all configs have from their base: a single stack and an encoder-decoder
FEW = (hea.SparseTransformerConfig, hea.SparseSeq2SeqConfig)
NAN = float("nan")
WRONG: list[Any] = [None, "a", [], {}, -1, 0, 10**18, 1e18, NAN, [[[]]], [["a"] * 3] * 3, {"a": 1}, {"0": [3]}]
# transformers writes what is called dtype as the name of one, at any depth
WRONG += [{"dtype": []}, "a" * 9999]
# what transformers, its older versions and other libraries write into configs
WRITTEN = (
    *("torchscript", "use_bfloat16", "tf_legacy_loss", "pruned_heads", "is_decoder", "cross_attention_hidden_size"),
    *("add_cross_attention", "tie_encoder_decoder", "finetuning_task", "task_specific_params", "tokenizer_class"),
    *("prefix", "decoder_start_token_id", "mask_token_id", "auto_map", "quantization_config", "model_type"),
    *("_attn_implementation_autoset", "gradient_checkpointing", "transformers_weights", "unsloth_version"),
    *("_name_or_path", "transformers_version", "_commit_hash", "adapter_config", "trust_remote_code", "revision"),
    *("pretraining_tp", "max_length", "num_beams", "use_cache", "sentence_transformers", "custom_pipelines"),
)


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Say nothing of what transformers notes about strange configs, which is long."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def field_names(config: type[PreTrainedConfig]) -> list[str]:
    return [field.name for field in dataclasses.fields(config) if field.name in own_fields(config)]


def check_refusal(build: Callable[[], Any], name: str) -> None:
    """Build a config; another error than a short one of the package fails the test."""
    try:
        build()
    # what transformers checks itself says it in its own words
    except (hea.ConfigurationError, StrictDataclassError) as refusal:
        length = len(str(refusal))
    else:
        length = 0
    assert length <= 500, name


@pytest.mark.parametrize("config", CONFIGS)
def test_nonsense_is_refused_or_a_config(config: type[PreTrainedConfig], tmp_path: Path) -> None:
    """Each field of our own gets some of the wrong values."""
    names = field_names(config)
    saved = json.loads(config().to_json_string(use_diff=False))
    for index, name in enumerate(names):
        value, written = (WRONG[number % len(WRONG)] for number in (index, index + 5))
        check_refusal(lambda: config(**{name: value}), name)  # noqa: B023
        (tmp_path / "config.json").write_text(json.dumps({**saved, name: written}))
        check_refusal(lambda: AutoConfig.from_pretrained(tmp_path), name)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"pad_token_id": "a"}, "pad_token_id='a'; it must be int or None"),
        ({"vocab_size": "a" * 20_000}, "vocab_size='aaa.*; it must be int"),
        ({"layer_types": 3}, "layer_types=3 is not a field of"),
        ({"key_value_heads": 3}, "key_value_heads=3 is not a field of .*: the class defines key_value_heads itself"),
        ({"attention_pattern": 3}, "pattern"),
        ({"causal": True}, "causal=True is not a field of"),
        ({"to_dict": 3}, "to_dict=3 is not a field of .*: the class defines to_dict itself"),
        ({"add_cross_attention": True}, "add_cross_attention=True is not a field of .*, which has no cross-attention"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("config", FEW)
def test_refusals_name_field_value_and_what_is_allowed(
    config: type[PreTrainedConfig], fields: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(hea.ConfigurationError, match=sentence):
        config(**fields)


@pytest.mark.parametrize("kind", ["lineer", ["linear"]])
def test_an_unknown_kind_of_rope_is_refused(kind: Any) -> None:
    with pytest.raises(hea.ConfigurationError, match="rope_type"):
        hea.SimplifiedTransformerConfig(rope_parameters={"rope_type": kind, "rope_theta": 10_000.0})


def test_labels_may_be_counted_by_numpy() -> None:
    config = hea.AdaptiveSpanConfig(num_labels=numpy.int64(3))
    assert config.id2label == {0: "LABEL_0", 1: "LABEL_1", 2: "LABEL_2"}
    assert hea.AdaptiveSpanConfig(id2label={numpy.int64(0): "no", "1": "yes"}).id2label == {0: "no", 1: "yes"}


@pytest.mark.parametrize("config", FEW)
def test_errors_are_those_of_transformers_too(config: type[PreTrainedConfig]) -> None:
    """Who catches what transformers and huggingface_hub raise needs no change; the first error stands behind ours."""
    for kind in (ValueError, TypeError, StrictDataclassFieldValidationError):
        with pytest.raises(kind) as refusal:
            config(hidden_size="wide")
        assert isinstance(refusal.value.__cause__, StrictDataclassFieldValidationError)


@pytest.mark.parametrize("config", CONFIGS)
def test_a_field_written_later_is_checked(config: type[PreTrainedConfig]) -> None:
    built = config()
    for name, value in {"hidden_size": "wide", "num_hidden_layers": "a"}.items():
        with pytest.raises(hea.ConfigurationError, match=f"(?:{name}|encoder_layers)="):
            setattr(built, name, value)
    built.dtype = "float16"
    assert config(dtype=torch.float16).dtype == config(dtype="float16").dtype == torch.float16


def test_a_field_by_its_other_name_is_checked() -> None:
    with pytest.raises(hea.ConfigurationError, match="encoder_layers=-5 must be at least 1"):
        hea.SparseSeq2SeqConfig(num_hidden_layers=-5)
    assert hea.SparseSeq2SeqConfig(num_hidden_layers=3).encoder_layers == 3


def test_fields_have_names() -> None:
    with pytest.raises(hea.ConfigurationError, match="Pass fields by name"):
        hea.AdaptiveSpanConfig(64)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("num_layer", "num_hidden_layers"),
        ("n_layer", "num_hidden_layers"),
        ("num_heads", "num_attention_heads"),
        ("n_head", "num_attention_heads"),
        ("hiden_size", "hidden_size"),
        ("n_embd", "hidden_size"),
        ("d_model", "hidden_size"),
        ("ffn_dim", "intermediate_size"),
        ("dropout", "hidden_dropout"),
        ("max_position_embedding", "max_position_embeddings"),
        ("zzz", "a subclass may declare more"),
    ],
)
@pytest.mark.parametrize("config", FEW)
def test_unknown_fields_are_refused_with_the_near_name(
    config: type[PreTrainedConfig], name: str, meant: str, tmp_path: Path
) -> None:
    """transformers would keep them without a word. Those of a file are kept with one: what was saved must load."""
    with pytest.raises(hea.ConfigurationError, match=rf"\b{name}=3 is not a field of .*{meant}"):
        config(**{name: 3})
    (tmp_path / "config.json").write_text(json.dumps({**json.loads(config().to_json_string()), name: 3}))
    # of a newer version, or of the user, whom it must not lock out; saved again, it is still there
    for _ in range(2):
        kept = AutoConfig.from_pretrained(tmp_path)
        assert getattr(kept, name) == 3
        kept.save_pretrained(tmp_path)


@pytest.mark.parametrize("config", [hea.SparseTransformerConfig, hea.EfficientReformerConfig, hea.BPTransformerConfig])
def test_a_decoder_is_causal(config: type[PreTrainedConfig]) -> None:
    """By its name in BERT's config; one of both directions would see what it is to predict."""
    assert config(is_causal=True, is_decoder=True).is_causal
    with pytest.raises(hea.ConfigurationError, match=r"is_decoder=True .* Write is_causal=True"):
        config(is_causal=False, is_decoder=True)


@pytest.mark.parametrize("config", CONFIGS)
def test_what_libraries_write_is_kept(config: type[PreTrainedConfig]) -> None:
    given = {name: None for name in WRITTEN if name not in ("num_beams", "max_length", "use_cache")}
    built = config(**given, num_beams=4, max_length=9, use_cache=False)
    assert built.to_dict()["tie_encoder_decoder"] is None


@pytest.mark.parametrize("config", CONFIGS)
def test_subclasses_have_fields_of_their_own(config: type[PreTrainedConfig]) -> None:
    class Declared(config):  # type: ignore[valid-type, misc]
        n_layer: int = 3
        plain = 4

    class Written(config):  # type: ignore[valid-type, misc]
        def __init__(self, block_size: int = 3, **fields: Any) -> None:
            self.block_size = block_size
            super().__init__(**fields)

    for built in (Declared(n_layer=5, plain=6), Declared.from_dict(Declared(n_layer=5, plain=6).to_dict())):
        assert (built.n_layer, built.plain) == (5, 6)
    assert Written.from_dict(Written(block_size=5).to_dict()).block_size == 5
    for own in (Declared, Written):
        with pytest.raises(hea.ConfigurationError, match="d_model=3 is not a field"):
            own(d_model=3)


@pytest.mark.parametrize(
    ("build", "given"),
    [
        (hea.SparseTransformerConfig, "attention_window"),
        (hea.SparseTransformerConfig.longformer, "window"),
        (hea.SparseTransformerConfig.bigbird_itc, "block_size"),
        (hea.SparseSeq2SeqConfig, "attention_window"),
    ],
)
def test_arguments_of_presets_are_no_fields(build: Callable[..., PreTrainedConfig], given: str) -> None:
    """transformers would keep them without a word, and the model would read with full attention."""
    with pytest.raises(hea.ConfigurationError, match=rf"{given}=64 is not a field of .* attention_pattern=.* preset"):
        build(**{given: 64})


def test_an_activation_with_a_slope_can_be_built() -> None:
    """Not every family has a field for the slope; the others have the one of torch."""
    sizes = {"hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1}
    with torch.device("meta"):
        for config in CONFIGS:
            model = AutoModel.from_config(config(hidden_act="leaky_relu", vocab_size=8, pad_token_id=0, **sizes))
            assert sum(isinstance(module, torch.nn.LeakyReLU) for module in model.modules()) >= 1


@pytest.mark.parametrize(
    ("config", "given", "meant"),
    [
        (hea.AdaptiveSpanConfig, "max_span", "span_limit"),
        (hea.SparseSeq2SeqConfig, "num_layers", "num_hidden_layers"),
        (hea.SparseSeq2SeqConfig, "num_decoder_layers", "decoder_layers"),
    ],
)
def test_names_of_other_libraries(config: type[PreTrainedConfig], given: str, meant: str) -> None:
    with pytest.raises(hea.ConfigurationError, match=rf"{given}=64 is not a field of .*{meant}"):
        config(**{given: 64})


# one object for every number of this size, since Python does not write it
HUGE = 10**5000


def numeric_fields(config: type[PreTrainedConfig]) -> dict[str, set[str]]:
    """Return the types, by name, of fields of our own that are a number, or a list of numbers."""
    own, found = {name for cls in config.__mro__ if cls.__module__.startswith(hea.__name__) for name in vars(cls)}, {}
    for field in dataclasses.fields(config):
        text = getattr(field.type, "__name__", str(field.type))
        types = {*text.replace("[", " ").replace("]", " ").replace("|", " ").split()}
        if field.name in own and types <= {"int", "float", "None", "list"}:
            found[field.name] = types
    return found


def put(value: Any, name: str) -> Any:
    """Return the value in the lists that the field wants around it."""
    return {"frozen_spans": [[value]], "rope_theta_per_layer": [value]}.get(name, value)


def test_all_configs_are_found() -> None:
    assert len(CONFIGS) == 11
    assert "num_key_value_heads" in numeric_fields(hea.SparseTransformerConfig)
    assert "activation_dropout" in numeric_fields(hea.AdaptiveSpanConfig)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.__name__)
def test_numbers_out_of_range(config: type[PreTrainedConfig]) -> None:
    for name, types in numeric_fields(config).items():
        values: list[Any] = [10**18, -(10**18), HUGE, float("nan"), float("inf"), True, "1", [None], {}]
        values += [] if "None" in types else [None]
        values += [1.5, -0.5] if name.endswith("dropout") else []
        values += [0, 10**9] if name.endswith(("_layers", "_heads")) else []
        for value in values:
            with pytest.raises(ConfigurationError) as refusal:
                config(**{name: put(value, name)})
            assert len(str(refusal.value)) <= 500
            assert name in str(refusal.value)


@pytest.mark.parametrize("config", FEW)
def test_heads_of_a_wide_model(config: type[PreTrainedConfig]) -> None:
    with pytest.raises(ConfigurationError, match="Nearest numbers that do"):
        config(hidden_size=2**23, num_attention_heads=7)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.__name__)
def test_heads_that_do_not_rotate_may_have_an_odd_size(config: type[PreTrainedConfig]) -> None:
    rotates = getattr(config(), "position_embedding_type", None) == "rope"
    positions = {"position_embedding_type": "learned"} if rotates else {}
    assert config(hidden_size=20, num_attention_heads=4, **positions).head_dim == 5
