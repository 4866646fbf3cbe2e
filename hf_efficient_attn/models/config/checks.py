"""Checks that all families share: fields that take one of a few values, and ranges of numbers."""

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from math import isqrt
from typing import Any

from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.integration.layer_patterns import (
    DECODER,
    ENCODER,
    FIELD,
    PARTS,
    checked_spec,
    config_patterns,
    directed,
)
from hf_efficient_attn.messages import shown
from hf_efficient_attn.models.global_tokens.rules import NOT_RELATIVE, check_rule
from hf_efficient_attn.patterns.pattern import Pattern
from hf_efficient_attn.patterns.serialization import MAX_HEADS, MAX_INTEGER

# The ranges of numeric config fields: one table for all families, by the endings of the fields' names.


MAX_LAYERS = 10_000
# numbers per token
MAX_WIDTH = 2**24
# (endings of names, minimum, maximum); the first that matches counts
RANGES: tuple[tuple[tuple[str, ...], float, float], ...] = (
    (("_dropout",), 0, 1),
    (("_eps", "_epsilon", "_std", "_range"), 0, MAX_INTEGER),
    (("_layers",), 1, MAX_LAYERS),
    (("_heads",), 1, MAX_HEADS),
    (("hidden_size", "intermediate_size", "embedding_size"), 1, MAX_WIDTH),
    (("type_vocab_size", "_offset", "_seed", "chunk_size_feed_forward"), 0, MAX_INTEGER),
    (("vocab_size", "_positions", "_embeddings", "_limit", "_ramp", "_tokens", "_up_to"), 1, MAX_INTEGER),
)


def check_numbers(config: Any) -> None:
    """Raise ConfigurationError for a number that is not finite, or out of the range of its field.

    transformers has already checked the types when the fields were set.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        for number in value if isinstance(value, list | tuple) else (value,):
            if isinstance(number, int | float) and not isinstance(number, bool):
                _check_number(field.name, number)


def _check_number(name: str, number: float) -> None:
    ranges = (limits for ends, *limits in RANGES if name.endswith(ends))
    least, most = next(ranges, (-MAX_INTEGER, MAX_INTEGER))
    # comparisons with NaN are False
    if least <= number <= most:
        return
    if name.endswith("_dropout"):
        raise ConfigurationError(f"{name}={shown(number)} must be a probability, from 0 to 1.")
    side = f"at least {least}" if number < least else f"a finite number from {least} to {most}"
    raise ConfigurationError(f"{name}={shown(number)} must be {side}.")


def check_heads(hidden_size: int, num_heads: int, hidden_name: str, heads_name: str) -> None:
    """Raise ConfigurationError if the heads do not divide the width."""
    if hidden_size % num_heads:
        small = [count for count in range(1, isqrt(hidden_size) + 1) if hidden_size % count == 0]
        divisors = {*small, *(hidden_size // count for count in small)}
        nearest = sorted(divisors, key=lambda count: (abs(count - num_heads), count))[:3]
        raise ConfigurationError(
            f"{heads_name}={num_heads} does not divide {hidden_name}={hidden_size}, but every head has an equal part "
            f"of the width. Nearest numbers that do: {sorted(nearest)}."
        )


# the choices of every family that has the field and does not list others
CHOICES: dict[str, tuple[Any, ...]] = {
    "hidden_act": tuple(ACT2FN),
    "classifier_activation": tuple(ACT2FN),
    "lm_transform_activation": (None, *ACT2FN),
    "norm_type": ("layernorm", "rmsnorm"),
    "norm_position": ("post", "pre"),
    "position_embedding_type": ("learned", "sinusoidal", "relative", "rope", "none"),
    "sinusoid_layout": ("interleaved", "halves"),
    "classifier_pooling": (None, "first", "last", "mean"),
    "random_blocks_in_eval": ("fixed", "transformers"),
}


def check_fields(config: Any, choices: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise ConfigurationError for a field whose value is not among its `choices`, or out of its range."""
    check_numbers(config)
    for name, allowed in {**CHOICES, **choices}.items():
        value = getattr(config, name, allowed[0])
        if value not in allowed:
            names = [str(each) for each in allowed]
            raise ConfigurationError(
                f"{name}={shown(value)}; it must be one of: {', '.join(names)}.{meant(value, names)}"
            )
    _check_rope_type(config)
    check_token(config, "pad_token_id")


def _check_rope_type(config: Any) -> None:
    given = getattr(config, "rope_parameters", None) or {}
    kind = given.get("rope_type", given.get("type", "default"))
    kinds = ["default", *ROPE_INIT_FUNCTIONS]
    if kind not in kinds:
        raise ConfigurationError(
            f"rope_parameters has rope_type={shown(kind)}; it must be one of: {', '.join(kinds)}.{meant(kind, kinds)}"
        )


def check_token(config: Any, name: str) -> None:
    """Raise ConfigurationError for a token that is not in the vocabulary; None is accepted."""
    token = getattr(config, name)
    if token is not None and not 0 <= token < config.vocab_size:
        raise ConfigurationError(
            f"{name}={token}; it must be None or a token of the vocabulary, 0 to {config.vocab_size - 1} "
            f"(vocab_size={config.vocab_size})."
        )


def check_least(config: Any, **least: int) -> None:
    """Raise ConfigurationError for a field below its minimum; None is accepted."""
    for name, number in least.items():
        value = getattr(config, name)
        if value is not None and value < number:
            raise ConfigurationError(f"{name}={value} must be at least {number}.")


def refuse_pattern(config: Any, why: str) -> None:
    """Raise ConfigurationError for an `attention_pattern` of layers that follow none.

    why: what the layers attend to, as a clause of the message.
    """
    spec = getattr(config, FIELD, None)
    if spec is not None:
        raise ConfigurationError(f"{FIELD}={shown(spec)}: {why}, and follow no other pattern. Leave it out.")


def meant(value: Any, names: Sequence[str]) -> str:
    """Return " Did you mean …?" with the most similar name, as the end of a message; empty if none is similar."""
    close = difflib.get_close_matches(shown(value).strip("'"), names, n=1)
    return f" Did you mean {shown(close[0])}?" if close else ""


# What the configs of the sparse families share: their pattern, and the checks of fields that exclude each other.


def write_pattern(config: Any) -> None:
    """Write `attention_pattern` in JSON types, after checking that the config's layers can have it.

    Raises:
        ConfigurationError: a pattern of unknown form or for another number of layers or heads, one that does not fit
            the direction of its layers, or global tokens beyond the end of the position table.
    """
    if config.attention_pattern is not None:
        config.attention_pattern = checked_spec(config.attention_pattern, config)
        check_shared_heads(config)
        check_directions(config)
        check_pattern_positions(config)


def check_shared_heads(config: Any) -> None:
    """Raise ConfigurationError for patterns that the heads of a layer cannot share evenly."""
    for part in PARTS:
        for pattern in set(config_patterns(config.attention_pattern, config, part) or ()) - {None}:
            pattern.heads(config.num_attention_heads)


def check_directions(config: Any) -> None:
    """Raise ConfigurationError for a pattern that does not fit the direction of its layers, causal or bidirectional."""
    directions = {ENCODER: False, DECODER: True}
    if not config.is_encoder_decoder:
        directions = {ENCODER: config.is_causal}
    for part, is_causal in directions.items():
        for pattern in set(config_patterns(config.attention_pattern, config, part) or ()) - {None}:
            directed(pattern, is_causal)


def check_pattern_positions(config: Any) -> None:
    """Raise ConfigurationError for global tokens of a pattern beyond the rows of the learned position table."""
    if config.position_embedding_type != "learned":
        return
    for part, field in ((ENCODER, "max_position_embeddings"), (DECODER, "max_target_position_embeddings")):
        num_positions = getattr(config, field, config.max_position_embeddings)
        for pattern in set(config_patterns(config.attention_pattern, config, part) or ()) - {None}:
            _check_global_positions(pattern, num_positions, f"0 to {num_positions - 1} ({field}={num_positions})")


def _check_global_positions(pattern: Pattern, num_positions: int, allowed: str) -> None:
    """Raise ConfigurationError for a global token outside of `num_positions`."""
    for named in pattern.global_positions():
        if not named.is_within(num_positions):
            raise ConfigurationError(
                f"attention_pattern has the global position {named.position}{named.unit}, but inputs only have "
                f"positions {allowed}. Leave it out, or extend the position table."
            )


def check_short_inputs(config: Any) -> None:
    """Raise ConfigurationError for transformers' evaluation of BigBird in a causal model.

    Which blocks are replaced by block 0 depends on the last block, and full attention depends on the length: text
    after a token would change the token's output.
    """
    if not config.is_causal:
        return
    for name, allowed in {"random_blocks_in_eval": "fixed", "full_attention_up_to": None}.items():
        value = getattr(config, name)
        if value != allowed:
            raise ConfigurationError(
                f"{name}={shown(value)} depends on the length of the text, but is_causal=True: tokens must not depend "
                f"on later ones. It must be {shown(allowed)} here: leave it out, or build a bidirectional model."
            )


def check_attention(config: Any) -> None:
    """Raise ConfigurationError for global tokens, positions and lengths that exclude each other."""
    check_short_inputs(config)
    has_table = config.position_embedding_type == "learned"
    check_rule(config.global_tokens, config.vocab_size, config.max_position_embeddings if has_table else None)
    is_relative = config.position_embedding_type == "relative"
    if is_relative and (config.global_tokens is not None or config.global_projections):
        raise ConfigurationError(f"{NOT_RELATIVE} Set global_tokens=None and global_projections=False, or use 'rope'.")
