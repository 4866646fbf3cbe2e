"""Refuse values no pattern can have; every message says what is wrong, what is allowed, and what to do next."""

from collections.abc import Iterable
from typing import Any

from hf_efficient_attn.errors import ConfigurationError, InputError


def check_integer(pattern: str, field: str, value: Any, at_least: int, advice: str = "") -> None:
    """Refuse `value` unless it is an integer (no bool) of at least `at_least`.

    Raises:
        ConfigurationError: names the pattern's kind, the field, the value, and ends with `advice`.
    """
    if not is_integer(value) or value < at_least:
        message = f"{pattern}: {field} is {value!r}; it must be an integer of at least {at_least}."
        raise ConfigurationError(f"{message} {advice}".rstrip())


def check_bool(pattern: str, field: str, value: Any) -> None:
    """Refuse `value` unless it is True or False.

    Raises:
        ConfigurationError: names the pattern's kind, the field and the value.
    """
    if not isinstance(value, bool):
        raise ConfigurationError(f"{pattern}: {field} is {value!r}; it must be true or false.")


def check_choice(pattern: str, field: str, value: Any, choices: Iterable[str]) -> None:
    """Refuse `value` unless it is one of `choices`.

    Raises:
        ConfigurationError: lists the choices.
    """
    choices = tuple(choices)
    if value not in choices:
        raise ConfigurationError(f"{pattern}: {field} is {value!r}; choose one of {', '.join(choices)}.")


def integers(pattern: str, field: str, values: Any) -> tuple[int, ...]:
    """Return `values`, an iterable of integers, sorted and each once.

    Raises:
        ConfigurationError: it is no iterable of integers.
    """
    listed = None if isinstance(values, str) or not isinstance(values, Iterable) else tuple(values)
    if listed is None or not all(is_integer(value) for value in listed):
        raise ConfigurationError(f"{pattern}: {field} is {values!r}; it must be a list of integers, such as [0].")
    return tuple(sorted(set(listed)))


def check_length(name: str, value: int) -> None:
    """Refuse a length that is no positive integer.

    Raises:
        InputError: names the length and its value.
    """
    if not is_integer(value) or value < 1:
        raise InputError(f"{name} is {value!r}; it must be an integer of at least 1.")


def is_integer(value: Any) -> bool:
    """Return whether `value` is an integer; True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)
