"""Checks of whether a model can follow a pattern, before any trial."""

from typing import Any

from transformers import PreTrainedConfig

from hf_efficient_attn.attention.layer_patterns import checked_spec
from hf_efficient_attn.errors import ConfigurationError, UnsupportedBackendError
from hf_efficient_attn.messages import shown

# sparse models of transformers that `convert` reads
CONVERTED = ("big_bird", "bigbird_pegasus", "led", "longformer")


def check_class(model_class: Any, config: PreTrainedConfig) -> None:
    """Raise UnsupportedBackendError for a class that does not use the attention interface of transformers."""
    if not model_class._can_set_attn_implementation():
        raise UnsupportedBackendError(
            f"{model_class.__name__} does not use the attention interface of transformers, so its attention cannot be "
            f"replaced. {other_way(config)}"
        )


def other_way(config: PreTrainedConfig) -> str:
    """Return what to do with a model that cannot be sparsified."""
    if config.model_type in CONVERTED:
        return "It is sparse by itself: hf_efficient_attn.convert(model) makes a model of it that follows patterns."
    return "model_cards/engine.md lists models that do."


def check_home(config: PreTrainedConfig) -> None:
    """Raise ConfigurationError for an `attention_pattern` in the config of a composite model: no layer reads it."""
    text_config = config.get_text_config()
    if text_config is not config:
        raise ConfigurationError(
            f"attention_pattern is in {type(config).__name__}, but layers read it in the config of their part, "
            f"{type(text_config).__name__}, and would ignore it. Delete it there, and call sparsify(model, pattern)."
        )


def checked_pattern(pattern: Any, config: PreTrainedConfig) -> Any:
    """Return a pattern in JSON types, after checking that it fits a model with this config.

    Raises:
        ConfigurationError: it does not fit, or is of unknown form.
    """
    text_config = config.get_text_config()
    if getattr(text_config, "span", None) is not None:
        raise ConfigurationError(
            f"This {type(text_config).__name__} has span={shown(text_config.span)}: its heads read as far as their "
            "spans, and would follow no pattern. Sparsify a model without spans."
        )
    if text_config is not config and config.is_encoder_decoder:
        raise ConfigurationError(
            f"{type(config).__name__} joins two models, each with a config of its own. Call sparsify on model.encoder "
            "or model.decoder."
        )
    return checked_spec(pattern, text_config)
