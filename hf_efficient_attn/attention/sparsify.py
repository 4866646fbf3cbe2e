"""`sparsify`: give a transformers model or config an attention pattern, or take it away."""

import copy
import weakref
from typing import Any, TypeVar

from transformers import PreTrainedConfig, PreTrainedModel

from hf_efficient_attn.attention.follow_check import watch
from hf_efficient_attn.attention.given_positions import note_positions
from hf_efficient_attn.attention.layer_patterns import FIELD, KNOWN, NAME, checked_spec
from hf_efficient_attn.attention.trial import base_class, try_model
from hf_efficient_attn.errors import ConfigurationError, UnsupportedBackendError
from hf_efficient_attn.messages import shown

T = TypeVar("T", PreTrainedModel, PreTrainedConfig)

# sparse models of transformers that `convert` reads
CONVERTED = ("big_bird", "bigbird_pegasus", "led", "longformer")
# attention implementations that sparsify replaced, by the identity of the config; configs have no hash
_replaced: dict[int, tuple["weakref.ref[PreTrainedConfig]", str | None]] = {}


def sparsify(model_or_config: T, pattern: Any) -> T:
    """Return the model or config, changed in place: its attention follows `pattern` from now on.

    The pattern is recorded in `config.attention_pattern` and saved with the model, and `attn_implementation` becomes
    "efficient". No weight changes. Positions count from the first token that is not padding.

    Args:
        model_or_config: a model or config of transformers; of a composite one (vision and language), the text part.
        pattern: one of these, or None, which restores the model's own attention:
            - a pattern: for all layers, in causal models its causal form; layers that are sliding or chunked by
              themselves keep their own attention;
            - a list with one pattern or None per layer, None: the layer's own attention;
            - {"tile": "LLG", "patterns": {"L": ..., "G": ...}}: letters repeated over the layers;
            - {"encoder": ..., "decoder": ...}, each one of the above or None, for an encoder-decoder. The other forms
              are for its encoder, and the decoder keeps its own attention. Cross-attention is always full.

    Raises:
        ConfigurationError: a pattern of unknown form, or one the model cannot have.
        UnsupportedBackendError: the model does not use the attention interface of transformers in every layer that has
            a pattern, or needs what the engine cannot compute; told by a trial without numbers, before anything is
            changed, or after the first forward, where no trial could be run.
    """
    if isinstance(model_or_config, PreTrainedModel):
        _sparsify_model(model_or_config, pattern)
    elif isinstance(model_or_config, PreTrainedConfig):
        _try(base_class(model_or_config), model_or_config, pattern)
        _record(model_or_config, pattern)
        model_or_config._attn_implementation = _implementation(model_or_config, pattern)
    else:
        raise ConfigurationError(
            f"sparsify takes a model or a config of transformers, not {type(model_or_config).__name__}. Give the model "
            "itself where another library wraps it (model.module, model.get_base_model())."
        )
    return model_or_config


def _sparsify_model(model: PreTrainedModel, pattern: Any) -> None:
    if not model._can_set_attn_implementation():
        raise UnsupportedBackendError(
            f"{type(model).__name__} does not use the attention interface of transformers, so its attention cannot be "
            f"replaced. {other_way(model.config)}"
        )
    _try(type(model), model.config, pattern)
    spec = _record(model.config, pattern)
    text_config = model.config.get_text_config()
    copies = []
    for module in model.modules():
        # encoder-decoders such as T5 copy their config for each part
        config: Any = getattr(module, "config", None)
        if type(config) is type(text_config):
            _write(config, spec)
            copies.append(config)
        # a compiled model notices, and is compiled again
        module.__dict__.pop(KNOWN, None)
        if isinstance(module, PreTrainedModel) and refuse_other_attention not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(refuse_other_attention)
            module.register_forward_pre_hook(note_positions, with_kwargs=True)
    watch(model)
    # older versions of transformers have no such flag, and refuse every attention but sdpa
    model._supports_context_parallel = pattern is None and getattr(type(model), "_supports_context_parallel", False)
    model.set_attn_implementation(_implementation(model.config, pattern) or model.get_correct_attn_implementation(None))
    for config in copies:
        config._attn_implementation = text_config._attn_implementation


def other_way(config: PreTrainedConfig) -> str:
    """Return what to do about a model that cannot be sparsified."""
    if config.model_type in CONVERTED:
        return "It is sparse by itself: hf_efficient_attn.convert(model) makes a model of it that follows patterns."
    return "The README lists models that do."


def _try(model_class: Any, config: PreTrainedConfig, pattern: Any) -> None:
    """Raise if a model of the class would not follow the pattern, before anything is changed."""
    if pattern is not None and model_class is not None:
        config = copy.deepcopy(config)
        _record(config, pattern)
        try_model(model_class, config)


def _record(config: PreTrainedConfig, pattern: Any) -> Any:
    """Write the pattern into the config if the model can have it, and return what was written."""
    text_config = config.get_text_config()
    if pattern is not None and getattr(text_config, "span", None) is not None:
        raise ConfigurationError(
            f"This {type(text_config).__name__} has span={shown(text_config.span)}: its heads read as far as their "
            "spans, and would follow no pattern. Sparsify a model without spans."
        )
    if pattern is not None and text_config is not config and config.is_encoder_decoder:
        raise ConfigurationError(
            f"{type(config).__name__} joins two models, each with a config of its own. Call sparsify on model.encoder "
            "or model.decoder."
        )
    spec = None if pattern is None else checked_spec(pattern, text_config)
    _write(text_config, spec)
    return spec


def _write(config: PreTrainedConfig, spec: Any) -> None:
    if spec is None:
        config.__dict__.pop(FIELD, None)
    else:
        setattr(config, FIELD, spec)


def _implementation(config: PreTrainedConfig, pattern: Any) -> str | None:
    """Return the attention implementation to set; None: the default. Remembers which one "efficient" replaces."""
    key, current = id(config), config._attn_implementation
    if pattern is not None:
        if current != NAME:
            _replaced[key] = (weakref.ref(config, lambda _: _replaced.pop(key, None)), current)
        return NAME
    replaced, before = _replaced.pop(key, (lambda: None, None))
    if current != NAME:
        return current
    return before if replaced() is config else None


def refuse_other_attention(model: Any, inputs: Any) -> None:
    """Raise UnsupportedBackendError if a model with a pattern would compute without it; runs before every forward."""
    implementation = model.config._attn_implementation
    if getattr(model.config, FIELD, None) is not None and implementation != NAME:
        raise UnsupportedBackendError(
            f"This {type(model).__name__} has an attention_pattern, but its attn_implementation is "
            f"{shown(implementation)}, "
            f'which knows no patterns and would compute something else. Call model.set_attn_implementation("{NAME}"), '
            "or sparsify(model, None) for the model's own attention."
        )
