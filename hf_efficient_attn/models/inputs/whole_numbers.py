"""Lists of whole numbers as users have them, of Python, numpy or torch; and tensors of them, as models take them."""

import operator
from collections.abc import Mapping, Set, Sized
from typing import Any

import torch

from hf_efficient_attn.errors import InputError
from hf_efficient_attn.models.inputs.masks import refuse_other_types


def check_integers(name: str, given: Any, numbered: str) -> None:
    """Raise InputError for an input of a model that is no tensor of integers; numbered: what they number, in words."""
    refuse_other_types(given, name)
    if given.is_floating_point() or given.is_complex() or given.dtype == torch.bool:
        raise InputError(f"{name} is of {given.dtype}; it must hold the numbers of {numbered}, as integers.")


def entries(given: Any) -> list[Any] | None:
    """Return what a list, an array or a tensor holds; None: it is none of these, such as a tensor without axes."""
    if isinstance(given, str | Mapping | Set) or not isinstance(given, Sized):
        return None
    try:
        return list(given)  # type: ignore[call-overload,no-any-return]
    except TypeError:
        return None


def whole_numbers(given: Any) -> list[int] | None:
    """Return whole numbers of any kind, of Python, numpy or torch, as those of Python; None: it is something else.

    >>> whole_numbers((3, 7)), whole_numbers((3, 7.0)), whole_numbers((True, False)), whole_numbers(3)
    ([3, 7], None, None, None)
    """
    # arrays and tensors at once
    held = entries(given.tolist() if hasattr(given, "tolist") else given)
    if held is None or isinstance(given, bytes) or any(is_truth_value(each) for each in held):
        return None
    try:
        return [operator.index(each) for each in held]
    except TypeError:
        return None


def is_truth_value(given: Any) -> bool:
    """Return whether something is True or False, of Python, numpy or torch."""
    return isinstance(given, bool) or str(getattr(given, "dtype", "")).endswith("bool")
