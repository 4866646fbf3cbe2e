"""Which values are allowed in the fields that every config inherits from transformers, beyond their types."""

from collections.abc import Callable
from numbers import Integral
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

# transformers stores a name for each
MAX_LABELS = 2**20
PROBLEM_TYPES = (None, "regression", "single_label_classification", "multi_label_classification")
# its powers are computed in floating point
MAX_NUMBER = 1e30
POSITIVE_IN_ROPE = ("rope_theta", "factor", "original_max_position_embeddings")


def is_dtype(value: Any) -> bool:
    """Return whether this is None, a dtype of torch, the name of one, or "auto", which `transformers serve` writes."""
    if isinstance(value, str):
        return value == "auto" or isinstance(getattr(torch, value, None), torch.dtype)
    return value is None or isinstance(value, torch.dtype)


def is_list_of_names(value: Any) -> bool:
    """Return whether this is None or a list of strings."""
    return value is None or (isinstance(value, list) and all(isinstance(each, str) for each in value))


def is_count(value: Any) -> bool:
    """Return whether this is an integer of at least 0."""
    return isinstance(value, Integral) and not isinstance(value, bool) and value >= 0


def is_label_count(value: Any) -> bool:
    """Return whether this is a number of labels."""
    return is_count(value) and value <= MAX_LABELS


def is_problem_type(value: Any) -> bool:
    """Return whether this is None or a problem type of sequence classification."""
    return isinstance(value, str | None) and value in PROBLEM_TYPES


def is_label_names(value: Any) -> bool:
    """Return whether this is None or maps label numbers, which JSON writes as strings, to names."""
    keys = value if isinstance(value, dict) else ()
    return (value is None or isinstance(value, dict)) and all(
        isinstance(key, Integral) or (isinstance(key, str) and key.removeprefix("-").isdecimal() and len(key) < 20)
        for key in keys
    )


def is_label_numbers(value: Any) -> bool:
    """Return whether this is None or maps label names to numbers, which older files write as strings."""
    return value is None or (
        isinstance(value, dict) and all(isinstance(number, Integral | str) for number in value.values())
    )


def is_quantization(value: Any) -> bool:
    """Return whether this is None or a description of quantised weights that a config can be saved with."""
    return value is None or isinstance(value, dict) or callable(getattr(value, "to_dict", None))


def is_switch(value: Any) -> bool:
    """Return whether this is None, True or False."""
    return value is None or isinstance(value, bool)


def is_rope(value: Any) -> bool:
    """Return whether this is None or parameters of rotary positions of a known type, with positive numbers."""
    if not isinstance(value, dict):
        return value is None
    kind = value.get("rope_type", value.get("type", "default"))
    return (
        isinstance(kind, str)
        and (kind == "default" or kind in ROPE_INIT_FUNCTIONS)
        and all(_is_positive(value[name]) for name in POSITIVE_IN_ROPE if name in value)
    )


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < MAX_NUMBER


SWITCH = (is_switch, "True or False")
# field → (whether a value is allowed, which values are)
RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "dtype": (is_dtype, "None, a torch.dtype or the name of one, as 'float32', or 'auto'"),
    "num_labels": (is_label_count, f"an integer from 0 to {MAX_LABELS}"),
    "id2label": (is_label_names, "None or a dict from the number of each label to its name, as {0: 'no', 1: 'yes'}"),
    "label2id": (is_label_numbers, "None or a dict from the name of each label to its number, as {'no': 0, 'yes': 1}"),
    "architectures": (is_list_of_names, "None or a list of the names of model classes"),
    "problem_type": (is_problem_type, f"one of: {', '.join(map(str, PROBLEM_TYPES))}"),
    "chunk_size_feed_forward": (is_count, "an integer of at least 0"),
    "quantization_config": (is_quantization, "None, a dict, or a quantization config of transformers"),
    "output_hidden_states": SWITCH,
    "return_dict": SWITCH,
    "is_encoder_decoder": SWITCH,
    "rope_parameters": (
        is_rope,
        "None or a dict with a rope_type that is 'default' or another of transformers', and a rope_theta above 0, as "
        "{'rope_type': 'default', 'rope_theta': 10000.0}",
    ),
}
