"""What all configs with spans share: fields, checks, and the window that heads choose from."""

from dataclasses import dataclass
from typing import Any

from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.messages import shown
from hf_efficient_attn.models.spans.groups import SpanWindow
from hf_efficient_attn.models.spans.module import KINDS, Spans


@dataclass(init=False, repr=False, eq=False)
class SpanFields:
    """Mixin: how far the heads of a config with a `span` read; each family's config explains the fields."""

    span_limit: int = 1024
    span_ramp: int = 32
    span_penalty: float | int = 2e-6
    span_init: float | int = 0.0
    dynamic_span_bias: float | int = -4.0
    frozen_spans: list[list[float | int]] | None = None


def span_window(config: Any) -> SpanWindow:
    """Return which keys the heads of a config choose from."""
    return SpanWindow(config.span_limit, config.span_ramp, reads_self(config), config.is_causal)


def reads_self(config: Any) -> bool:
    """Return whether a token reads itself; by default where it reads both sides."""
    return bool(not config.is_causal if config.include_self is None else config.include_self)


def checked_window(config: Any, spans: Spans) -> SpanWindow:
    """Return which keys the heads of a layer choose from.

    Raises:
        ConfigurationError: the limit was changed in the config of a model that exists.
    """
    if config.span_limit != spans.limit:
        raise ConfigurationError(
            f"config.span_limit={config.span_limit}, but this model was built with {spans.limit}: its spans are shares "
            f"of that. Call set_span_limit(model, {config.span_limit}), which keeps them as long as they are."
        )
    return span_window(config)


def check_spans(config: Any) -> None:
    """Raise ConfigurationError for spans that no model can have."""
    if config.span not in KINDS:
        raise ConfigurationError(f"span={shown(config.span)}; it must be one of: {', '.join(KINDS)}.")
    if not 0 <= config.span_init <= 1:
        raise ConfigurationError(
            f"span_init={config.span_init} is a share of span_limit, from 0 to 1; {config.span_init:g} tokens are "
            f"span_init={config.span_init / config.span_limit:g}."
        )
    if config.span_penalty < 0:
        raise ConfigurationError(f"span_penalty={config.span_penalty} must be a number of at least 0.")
    if not config.is_causal and not reads_self(config):
        raise ConfigurationError(
            "include_self=False means that tokens read earlier ones only; it needs is_causal=True."
        )
    if config.frozen_spans is not None:
        check_frozen(config)


def check_frozen(config: Any) -> None:
    """Write `frozen_spans` in JSON types, or raise ConfigurationError."""
    if config.span == "dynamic":
        raise ConfigurationError(
            "frozen_spans with span='dynamic': every token chooses its span, so no list of numbers can replace "
            "them. Train with span='adaptive'."
        )
    if config.span_penalty:
        raise ConfigurationError(
            f"span_penalty={config.span_penalty} with frozen_spans: frozen spans are not trained, so nothing can be "
            "penalised. Set span_penalty=0.0."
        )
    spans = [[float(span) for span in layer] for layer in config.frozen_spans]
    shape = (config.num_hidden_layers, config.num_attention_heads)
    if len(spans) != shape[0] or any(len(layer) != shape[1] for layer in spans):
        raise ConfigurationError(
            f"frozen_spans lists {shown([len(layer) for layer in spans])} spans; it needs a list of {shape[1]} (heads) "
            f"for each of {shape[0]} layers."
        )
    outside = [span for layer in spans for span in layer if not 0 <= span <= config.span_limit]
    if outside:
        raise ConfigurationError(f"frozen_spans holds {outside[:5]}; spans are 0 to span_limit={config.span_limit}.")
    config.frozen_spans = spans
