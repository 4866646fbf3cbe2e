"""Which numbers the fields of a config may have: one table for all families, by the ends of the fields' names."""

import dataclasses
from math import isqrt
from typing import Any

from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.messages import shown
from hf_efficient_attn.patterns.serialization import MAX_HEADS, MAX_INTEGER

MAX_LAYERS = 10_000
# numbers per token
MAX_WIDTH = 2**24
# (ends of names, least, most); the first that matches counts
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

    transformers has checked the types when the fields were set.
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
        raise ConfigurationError(f"{name}={shown(number)} is a probability: 0 to 1.")
    side = f"at least {least}" if number < least else f"a finite number from {least} to {most}"
    raise ConfigurationError(f"{name}={shown(number)} must be {side}.")


def check_heads(hidden_size: int, num_heads: int, hidden_name: str, heads_name: str) -> None:
    """Raise ConfigurationError if the heads do not divide the width."""
    if hidden_size % num_heads:
        small = [count for count in range(1, isqrt(hidden_size) + 1) if hidden_size % count == 0]
        divisors = {*small, *(hidden_size // count for count in small)}
        nearest = sorted(divisors, key=lambda count: (abs(count - num_heads), count))[:3]
        raise ConfigurationError(
            f"{heads_name}={num_heads} does not divide {hidden_name}={hidden_size}: each head owns an equal slice of "
            f"the width. Nearest counts that do: {sorted(nearest)}."
        )
