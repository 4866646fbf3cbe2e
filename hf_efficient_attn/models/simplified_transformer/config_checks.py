"""Checks of simplified Transformer configs: fields from which no model can be built, and their messages."""

from collections.abc import Iterable
from typing import Any

from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.messages import shown
from hf_efficient_attn.models.config.choices import check_fields, meant
from hf_efficient_attn.models.config.library import check_given_pattern
from hf_efficient_attn.models.spans.config import check_spans

from .gains import BLOCK_STYLES, GAIN_SYMBOLS, PARALLEL_GAINS, REPARAMETERIZATION_GAINS, SEQUENTIAL_GAINS

CHOICES = {
    "block": tuple(BLOCK_STYLES),
    "final_norm_type": (None, "rmsnorm", "layernorm"),
    "position_embedding_type": ("sinusoidal", "scaled_sinusoidal", "learned", "alibi", "rope", "none"),
    "attention_bias": ("none", "query_key", "all"),
    "matrix_init": (None, "normal", "orthogonal", "identity"),
    "matrix_init_tie": (None, "last_layer", "all_layers"),
    "classifier_pooling": (None, "first", "last", "mean"),
}


def check_config(config: Any) -> None:
    """Raise ConfigurationError if no model can be built from the fields of a `SimplifiedTransformerConfig`."""
    check_fields(config, CHOICES)
    config.check_head_sizes()
    _check_key_value_heads(config)
    _check_gains(config)
    _check_matrices(config)
    _check_spans(config)
    check_given_pattern(config)


def _check_key_value_heads(config: Any) -> None:
    groups = config.key_value_heads
    if groups == config.num_attention_heads:
        return
    if groups < 1 or config.num_attention_heads % groups:
        raise ConfigurationError(
            f"num_key_value_heads={groups} does not divide num_attention_heads={config.num_attention_heads}."
        )
    if config.is_shaped or config.is_reparameterized or config.resolved_matrix_init != "normal":
        raise ConfigurationError(
            f"num_key_value_heads={groups} shares values among heads, but block={shown(config.block)} with "
            f"matrix_init={shown(config.resolved_matrix_init)} gives each of the {config.num_attention_heads} heads "
            "its own slice of a square value matrix. Leave num_key_value_heads unset, or use block='pre_ln' or "
            "'parallel' with plain matrices."
        )


def _check_gains(config: Any) -> None:
    foreign = SEQUENTIAL_GAINS if config.style.parallel else PARALLEL_GAINS
    for name in foreign:
        if getattr(config, name) is not None or name in (config.trainable_gains or ()):
            own = PARALLEL_GAINS if config.style.parallel else SEQUENTIAL_GAINS
            raise ConfigurationError(
                f"{name} ({GAIN_SYMBOLS[name]}) does not exist in block={shown(config.block)}; its skip is set by "
                f"{' and '.join(own)}."
            )
    for name in config.trainable_gains or ():
        if name not in GAIN_SYMBOLS:
            raise ConfigurationError(unknown("gain in trainable_gains", name, GAIN_SYMBOLS))
    for name in ("attention_gain", "mlp_gain", "softmax_gain"):
        if config.gain(name) == 0 and not config.is_trainable(name):
            raise ConfigurationError(
                f"{name}=0 as a constant cuts off the parameters behind it, which would never get a gradient. "
                f"Add {shown(name)} to trainable_gains, or choose another value."
            )


def _check_matrices(config: Any) -> None:
    if not config.is_reparameterized:
        given = [name for name in REPARAMETERIZATION_GAINS if getattr(config, name) is not None]
        given += [name for name in ("first_value_gain", "last_projection_gain") if getattr(config, name) is not None]
        given += [name for name in config.trainable_gains or () if name in REPARAMETERIZATION_GAINS]
        if given:
            raise ConfigurationError(
                f"{', '.join(given)} need W = a·W_init + b·ΔW, but reparameterized={config.is_reparameterized} for "
                f"block={shown(config.block)}. Set reparameterized=True."
            )
    if config.matrix_init_tie is not None and config.resolved_matrix_init != "orthogonal":
        raise ConfigurationError(
            f"matrix_init_tie={shown(config.matrix_init_tie)} ties orthogonal matrices, but they start as "
            f"{shown(config.resolved_matrix_init)}. Set matrix_init='orthogonal'."
        )
    if config.is_reparameterized and config.resolved_matrix_init == "normal":
        raise ConfigurationError(
            "W_init of a reparameterized matrix is 'identity' or 'orthogonal', got matrix_init='normal'."
        )


def _check_spans(config: Any) -> None:
    if config.span is None:
        if config.frozen_spans is not None:
            raise ConfigurationError(
                "frozen_spans need span='adaptive', but span is None: every head reads everything."
            )
        return
    check_spans(config)
    if config.position_embedding_type == "alibi":
        raise ConfigurationError(
            f"span={shown(config.span)} with position_embedding_type='alibi': ALiBi is a bias on all pairs, which "
            "spans do not compute. Use 'rope' or 'sinusoidal'."
        )
    if config.key_value_heads != config.num_attention_heads:
        raise ConfigurationError(
            f"span={shown(config.span)} with num_key_value_heads={config.key_value_heads}: heads of different spans "
            "cannot share keys. Leave num_key_value_heads unset."
        )


def gain_fields() -> list[str]:
    """Return the names of all config fields about gains."""
    return [*GAIN_SYMBOLS, "first_value_gain", "last_projection_gain", "per_head_gains", "trainable_gains"]


def unknown(what: str, value: object, allowed: Iterable[object]) -> str:
    """Return the message for a value that is not allowed, with the nearest one that is."""
    names = [str(name) for name in allowed]
    return f"Unknown {what}: {shown(value)}. Allowed: {', '.join(names)}.{meant(value, names)}"
