"""Checks of fields that take one of a few values, and of the ranges of numbers, the same for all families."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from transformers.activations import ACT2FN

from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.messages import shown
from hf_efficient_attn.models.config.numbers import check_numbers

# of the families that have such a field and no other choices
CHOICES: dict[str, tuple[Any, ...]] = {
    "hidden_act": tuple(ACT2FN),
    "classifier_activation": tuple(ACT2FN),
    "lm_transform_activation": (None, *ACT2FN),
    "norm_type": ("layernorm", "rmsnorm"),
    "norm_position": ("post", "pre"),
    "position_embedding_type": ("learned", "sinusoidal", "relative", "rope", "none"),
    "sinusoid_layout": ("interleaved", "halves"),
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
    if config.pad_token_id is not None and not 0 <= config.pad_token_id < config.vocab_size:
        raise ConfigurationError(
            f"pad_token_id={config.pad_token_id}; it must be None or a token of the vocabulary, 0 to "
            f"{config.vocab_size - 1} (vocab_size={config.vocab_size})."
        )


def meant(value: Any, names: Sequence[str]) -> str:
    """Return the question whether the nearest name was meant, as the end of a message; empty if none is near."""
    close = difflib.get_close_matches(shown(value).strip("'"), names, n=1)
    return f" Did you mean {shown(close[0])}?" if close else ""
