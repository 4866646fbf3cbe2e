"""Checks of simplified Transformer configs: fields from which no model can be built, and their messages."""

from collections.abc import Iterable
from typing import Any

from hf_efficient_attn.attention.indexed.config_field import INDEXER
from hf_efficient_attn.attention.layer_patterns import FIELD, is_single
from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.messages import shown
from hf_efficient_attn.models.config.choices import check_fields, meant
from hf_efficient_attn.models.config.library import check_given_pattern
from hf_efficient_attn.models.mechanisms.config import (
    FEATURE_FIELDS,
    FEATURE_MAPS,
    PRIOR_FIELDS,
    check_features,
    check_number,
)
from hf_efficient_attn.models.spans.config import check_spans
from hf_efficient_attn.patterns.layers import patterns_per_layer

from .gains import BLOCK_STYLES, GAIN_SYMBOLS, PARALLEL_GAINS, REPARAMETERIZATION_GAINS, SEQUENTIAL_GAINS

CHOICES = {
    "block": tuple(BLOCK_STYLES),
    "final_norm_type": (None, "rmsnorm", "layernorm"),
    "position_embedding_type": ("sinusoidal", "scaled_sinusoidal", "learned", "alibi", "rope", "none"),
    "attention_bias": ("none", "query_key", "all"),
    "matrix_init": (None, "normal", "orthogonal", "identity"),
    "matrix_init_tie": (None, "last_layer", "all_layers"),
    "feature_map": FEATURE_MAPS,
    "classifier_pooling": (None, "first", "last", "mean"),
}

LINEAR, PRIOR = "linear", "prior"
# fields that only one mechanism reads
OWN_FIELDS = {LINEAR: FEATURE_FIELDS, PRIOR: PRIOR_FIELDS}
# what models with layers of linear attention cannot have, as the end of a sentence
NOT_LINEAR = {
    "span": "a sum over keys cannot weigh each by its distance from the query",
    INDEXER: "a sum over keys is read whole, and nothing is chosen",
}
# where all layers have it
NOT_LINEAR_ALONE = {
    FIELD: "a sum over keys is read whole by all queries behind it",
    "position_embedding_type": "a product of features is no function of distances, and there are no scores to add to",
}
# where only some values are meant
OTHER_VALUES = {"position_embedding_type": ("alibi", "rope")}
# what models with layers that have a prior cannot have, as the end of a sentence
NOT_PRIOR = {
    "span": "a span weighs keys by their distance already",
    INDEXER: "keys that are chosen by other scores would be weighed by their distance as well",
}
WHAT = {LINEAR: "linear attention", PRIOR: "attention with a prior"}
# mechanisms of compressed Transformers: of slots,
OF_SLOTS = ("linformer", "memory_compressed")
# and of softmax over all that is read, with what stands against them
OF_SOFTMAX = {
    "nystrom": "without its convolution, but the matrix whose inverse it takes is singular where W^Q starts at 0, and "
    "it is not built here",
    **dict.fromkeys(
        ("talking_heads", "residual_scores", "reused_weights", "collaborative_heads"), "but it is not built here"
    ),
}


def check_config(config: Any) -> None:
    """Raise ConfigurationError if no model can be built from the fields of a `SimplifiedTransformerConfig`."""
    check_fields(config, CHOICES)
    config.check_head_sizes()
    _check_key_value_heads(config)
    _check_gains(config)
    _check_matrices(config)
    _check_spans(config)
    _check_mechanism(config)
    check_given_pattern(config)
    _check_followers(config)


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


def _check_mechanism(config: Any) -> None:
    for each in config.mechanism if isinstance(config.mechanism, list) else [config.mechanism]:
        if each not in (None, LINEAR, PRIOR):
            raise ConfigurationError(f"mechanism={shown(config.mechanism)}: {not_here(each)}")
    check_number(config)
    for mechanism, names in OWN_FIELDS.items():
        for name in () if config.layers_with(mechanism) else names:
            if getattr(config, name) != getattr(type(config), name):
                raise ConfigurationError(
                    f"{name}={shown(getattr(config, name))} is of {WHAT[mechanism]}, but mechanism is "
                    f"{shown(config.mechanism)}. Leave it out, or set mechanism={shown(mechanism)}."
                )
    if config.layers_with(LINEAR):
        _check_linear(config)
    if config.layers_with(PRIOR):
        refuse_fields(config, NOT_PRIOR)
        if config.position_embedding_type == "alibi":
            raise ConfigurationError(
                f"mechanism={shown(config.mechanism)} with position_embedding_type='alibi': ALiBi is another prior by "
                "distance. Leave one of them out."
            )


def not_here(mechanism: Any) -> str:
    """Return why no block has a mechanism."""
    own = (
        "these blocks have softmax attention (None), 'prior' and 'linear', in all layers or by a list with one for each"
    )
    if mechanism in OF_SLOTS:
        return (
            f"{shown(mechanism)} reads slots that trained maps make of tokens, so that what it reads at the start is "
            "no mean of tokens, which shaped attention takes away; no block here has it. Use a compressed_transformer, "
            "whose blocks have skips, or mechanism='linear' or 'prior'."
        )
    if mechanism in OF_SOFTMAX:
        return (
            f"shaped attention would start as the identity with {shown(mechanism)}, too, {OF_SOFTMAX[mechanism]}: "
            f"{own}. A compressed_transformer has it, in blocks with skips."
        )
    return (
        f"{shown(mechanism)} is unknown here: {own}; an attention_pattern says what softmax reads. A "
        f"compressed_transformer has other mechanisms, in blocks with skips.{meant(mechanism, (LINEAR, PRIOR))}"
    )


def _check_linear(config: Any) -> None:
    check_features(config)
    refuse_fields(config, NOT_LINEAR)
    if len(config.layers_with(LINEAR)) == config.num_hidden_layers:
        refuse_fields(config, NOT_LINEAR_ALONE)
    if config.feature_map == "constant":
        raise ConfigurationError(
            "feature_map='constant' reads all keys alike, whatever queries and keys are; shaped attention takes the "
            "same mean away, and no block here has it. Use 'elu' or 'positive_random'."
        )
    if config.key_value_heads != config.num_attention_heads:
        raise ConfigurationError(
            f"num_key_value_heads={config.key_value_heads} with mechanism={shown(config.mechanism)}: each head of "
            "linear attention adds up keys of its own. Leave it out."
        )


def _check_followers(config: Any) -> None:
    spec = getattr(config, FIELD, None)
    linear = config.layers_with(LINEAR)
    if spec is None or is_single(spec) or not linear:
        return
    patterns = patterns_per_layer(spec, config.num_hidden_layers)
    for layer in linear:
        if patterns[layer] is not None:
            raise ConfigurationError(
                f"{FIELD} has a pattern for layer {layer}, whose mechanism is 'linear': {NOT_LINEAR_ALONE[FIELD]}. "
                "Give None for this layer."
            )


def refuse_fields(config: Any, reasons: dict[str, str]) -> None:
    """Raise ConfigurationError for fields that exclude the mechanism of a config, each with its reason."""
    for name, reason in reasons.items():
        value = getattr(config, name, None)
        if value is not None and (name not in OTHER_VALUES or value in OTHER_VALUES[name]):
            raise ConfigurationError(
                f"mechanism={shown(config.mechanism)} with {name}={shown(value)}: {reason}. Leave one of them out."
            )


def gain_fields() -> list[str]:
    """Return the names of all config fields about gains."""
    return [*GAIN_SYMBOLS, "first_value_gain", "last_projection_gain", "per_head_gains", "trainable_gains"]


def unknown(what: str, value: object, allowed: Iterable[object]) -> str:
    """Return the message for a value that is not allowed, with the nearest one that is."""
    names = [str(name) for name in allowed]
    return f"Unknown {what}: {shown(value)}. Allowed: {', '.join(names)}.{meant(value, names)}"
