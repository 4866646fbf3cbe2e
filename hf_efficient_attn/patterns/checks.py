"""Checks of the values of patterns; every message says what is wrong, what is allowed, and what to do next."""

from collections.abc import Iterable
from itertools import islice
from typing import Any

from hf_efficient_attn.errors import ConfigurationError, InputError
from hf_efficient_attn.messages import shown

# kernels count positions in 32 bits; a larger number would wrap around
MAX_INTEGER = 2**31 - 1
# numbers in one list of a pattern
MAX_LISTED = 1 << 20
# patterns within a pattern, and how deep they may nest: each of them costs time for every block of queries
MAX_PARTS = 1024
MAX_DEPTH = 32
# heads of a model
MAX_HEADS = 2**16


def check_integer(pattern: str, field: str, value: Any, at_least: int, advice: str = "") -> None:
    """Refuse `value` unless it is an integer (not a bool) from `at_least` to MAX_INTEGER.

    Raises:
        ConfigurationError: names the pattern's kind, the field, the value, and ends with `advice`.
    """
    if not is_integer(value) or not at_least <= value <= MAX_INTEGER:
        limits = f"at least {at_least}" + (f" and at most {MAX_INTEGER}" if is_integer(value) and value > 0 else "")
        message = f"{pattern}: {field} is {shown(value)}; it must be an integer of {limits}."
        raise ConfigurationError(f"{message} {advice}".rstrip())


def check_bool(pattern: str, field: str, value: Any) -> None:
    """Refuse `value` unless it is True or False.

    Raises:
        ConfigurationError: names the pattern's kind, the field and the value.
    """
    if not isinstance(value, bool):
        raise ConfigurationError(f"{pattern}: {field} is {shown(value)}; it must be true or false.")


def check_choice(pattern: str, field: str, value: Any, choices: Iterable[str]) -> None:
    """Refuse `value` unless it is one of `choices`.

    Raises:
        ConfigurationError: lists the choices.
    """
    choices = tuple(choices)
    if not isinstance(value, str) or value not in choices:
        raise ConfigurationError(f"{pattern}: {field} is {shown(value)}; choose one of {', '.join(choices)}.")


def integers(pattern: str, field: str, values: Any) -> tuple[int, ...]:
    """Return `values`, an iterable or an array of integers, sorted and without duplicates.

    Raises:
        ConfigurationError: it is not an iterable of integers, has more than MAX_LISTED, or one of them is larger than a
            kernel can count.
    """
    given = plain(values)
    listed = None if isinstance(given, str) or not isinstance(given, Iterable) else first_listed(given)
    if listed is not None and len(listed) > MAX_LISTED:
        raise ConfigurationError(f"{pattern}: {field} is {shown(values)}, which are more than {MAX_LISTED} positions.")
    if listed is not None and not all(is_integer(value) for value in listed):
        listed = tuple(map(plain, listed))
    if listed is None or not all(is_integer(value) for value in listed):
        raise ConfigurationError(f"{pattern}: {field} is {shown(values)}; it must be a list of integers, such as [0].")
    far = [value for value in listed if abs(value) > MAX_INTEGER]
    if far:
        raise ConfigurationError(
            f"{pattern}: {field} has {shown(far[0])}; positions are at most {MAX_INTEGER}, and at least "
            f"{-MAX_INTEGER} where they count from the end."
        )
    return tuple(sorted(set(listed)))


def first_listed(values: Iterable[Any]) -> tuple[Any, ...]:
    """Return the values, but at most one more than are allowed."""
    return tuple(islice(values, MAX_LISTED + 1))


def plain(value: Any) -> Any:
    """Return an array or a tensor as lists and numbers, any other value as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def check_length(name: str, value: int) -> None:
    """Refuse a length that is not a positive integer, or more than a kernel can count.

    Raises:
        InputError: names the length and its value.
    """
    if not is_integer(value) or not 1 <= value <= MAX_INTEGER:
        raise InputError(f"{name} is {shown(value)}; it must be an integer of at least 1 and at most {MAX_INTEGER}.")


def check_head(head: int, num_heads: int = MAX_HEADS) -> None:
    """Refuse a number of a head that is not from 0 to `num_heads` - 1.

    Raises:
        InputError: names the head.
    """
    if not is_integer(head) or not 0 <= head < num_heads:
        raise InputError(
            f"head is {shown(head)}; it must be an integer from 0 to {num_heads - 1}, of {num_heads} heads."
        )


def is_integer(value: Any) -> bool:
    """Return whether `value` is an integer; True and False do not count."""
    return isinstance(value, int) and not isinstance(value, bool)
