"""Checks of patterns, and their JSON types as saved in `config.json`: {"kind": "band", "left": 256, "right": 256}.

Fields of a pattern are integers, booleans, strings, None, patterns, and tuples of these. A field that takes no part in
comparisons is derived from the others and is not written.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from itertools import islice
from typing import Any

from hf_efficient_attn.errors import ConfigurationError, InputError
from hf_efficient_attn.messages import shown

# Checks of the values of patterns. Every message says what is wrong, what is allowed, and what to do next.


# kernels use 32-bit positions; a larger number would overflow
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
        ConfigurationError: not an iterable of integers, more than MAX_LISTED integers, or one whose absolute value is
            more than MAX_INTEGER.
    """
    given = plain(values)
    listed = None if isinstance(given, str) or not isinstance(given, Iterable) else first_listed(given)
    if listed is not None and len(listed) > MAX_LISTED:
        raise ConfigurationError(f"{pattern}: {field} is {shown(values)}; give at most {MAX_LISTED} positions.")
    if listed is not None and not all(is_integer(value) for value in listed):
        listed = tuple(map(plain, listed))
    if listed is None or not all(is_integer(value) for value in listed):
        raise ConfigurationError(f"{pattern}: {field} is {shown(values)}; it must be a list of integers, such as [0].")
    far = [value for value in listed if abs(value) > MAX_INTEGER]
    if far:
        raise ConfigurationError(
            f"{pattern}: {field} has {shown(far[0])}; positions must be at most {MAX_INTEGER}, and at least "
            f"{-MAX_INTEGER} if they count from the end."
        )
    return tuple(sorted(set(listed)))


def first_listed(values: Iterable[Any]) -> tuple[Any, ...]:
    """Return the first values: at most MAX_LISTED + 1, so that callers see if there are too many."""
    return tuple(islice(values, MAX_LISTED + 1))


def plain(value: Any) -> Any:
    """Return an array or a tensor as lists and numbers, and any other value unchanged."""
    return value.tolist() if hasattr(value, "tolist") else value


def check_length(name: str, value: int) -> None:
    """Refuse a length that is not an integer from 1 to MAX_INTEGER.

    Raises:
        InputError: names the length and its value.
    """
    if not is_integer(value) or not 1 <= value <= MAX_INTEGER:
        raise InputError(f"{name} is {shown(value)}; it must be an integer of at least 1 and at most {MAX_INTEGER}.")


def check_head(head: int, num_heads: int = MAX_HEADS) -> None:
    """Refuse the index of a head unless it is an integer from 0 to `num_heads` - 1.

    Raises:
        InputError: names the head.
    """
    if not is_integer(head) or not 0 <= head < num_heads:
        raise InputError(
            f"head is {shown(head)}; it must be an integer from 0 to {num_heads - 1}, because there are {num_heads} "
            "heads."
        )


def is_integer(value: Any) -> bool:
    """Return whether `value` is an integer; True and False do not count."""
    return isinstance(value, int) and not isinstance(value, bool)


def write_pattern(pattern: Any) -> dict[str, Any]:
    """Return a pattern in JSON types; see `Pattern.to_dict`."""
    check_kind(pattern)
    return to_json(pattern)  # type: ignore[no-any-return]


def read_pattern(data: Any, kinds: Mapping[str, type]) -> Any:
    """Return the pattern that `write_pattern` wrote; see `Pattern.from_dict`. `kinds` maps kinds to classes."""
    if not isinstance(data, Mapping):
        raise ConfigurationError(f'A pattern must be a dict such as {{"kind": "causal"}}, not {shown(data)}.')
    check_nesting(data)
    return from_json(data, kinds)


def to_json(value: Any) -> Any:
    """Return a pattern, or a value of a pattern's field, in JSON types."""
    if isinstance(value, tuple):
        return [to_json(entry) for entry in value]
    if dataclasses.is_dataclass(value):
        fields = {field.name: to_json(getattr(value, field.name)) for field in written_fields(value)}
        return {"kind": getattr(value, "kind", None), **fields}
    return value


def check_kind(pattern: Any) -> None:
    """Refuse a pattern that cannot be written into a config.

    Raises:
        ConfigurationError: its class has no kind, or is not a dataclass.
    """
    if not pattern.kind:
        raise ConfigurationError(
            f"{type(pattern).__name__} is a subclass of Pattern without a kind; configs and operators find "
            f'its class by the kind. Give it one: class {type(pattern).__name__}(Pattern, kind="a_name_of_your_own").'
        )
    if not dataclasses.is_dataclass(pattern):
        raise ConfigurationError(
            f"{type(pattern).__name__} is not a dataclass; patterns are compared and saved by their fields. Write "
            "@dataclass(frozen=True) above the class."
        )


def check_nesting(data: Mapping[str, Any]) -> None:
    """Refuse dicts and lists that contain themselves, or that are nested deeper or hold more than patterns may.

    They are checked level by level.

    Raises:
        ConfigurationError: reading the dict would take too long, or forever.
    """
    level, num_dicts = [data], 0
    for _ in range(MAX_DEPTH):
        num_dicts += len(level)
        if num_dicts > MAX_PARTS:
            break
        level = [part for each in level for value in each.values() for part in _parts(value)]
        if not level:
            return
    raise ConfigurationError(
        f"A pattern can hold at most {MAX_PARTS} other patterns, nested at most {MAX_DEPTH} deep; {shown(data)} holds "
        "more, or holds itself. List the keys of every query in a key_table instead."
    )


def _parts(value: Any) -> list[Any]:
    """Return the dicts in the value of a field: a dict, a list of dicts, or a list of lists without dicts."""
    if isinstance(value, Mapping):
        return [value]
    listed = value if isinstance(value, list | tuple) else ()
    rows = [entry for entry in listed if isinstance(entry, list | tuple)]
    if any(isinstance(entry, list | tuple | Mapping) for row in rows for entry in row):
        raise ConfigurationError(
            f"A field of a pattern can nest lists of numbers at most two deep, not {shown(value)}."
        )
    return [entry for entry in listed if isinstance(entry, Mapping)]


def from_json(value: Any, kinds: Mapping[str, type]) -> Any:
    """Return the value that `to_json` was given; `kinds` maps kinds to classes.

    Raises:
        ConfigurationError: an unknown kind, unknown or missing fields, or values the pattern refuses.
    """
    if isinstance(value, list | tuple):
        return tuple(from_json(entry, kinds) for entry in value)
    if isinstance(value, Mapping):
        return _pattern(dict(value), kinds)
    return value


def _pattern(data: dict[str, Any], kinds: Mapping[str, type]) -> Any:
    kind = data.pop("kind", None)
    if not isinstance(kind, str) or kind not in kinds:
        if kind is None:
            raise ConfigurationError(f"A pattern has no kind; {allowed_names(kind, kinds)}")
        raise unknown_pattern(kind, kinds)
    fields = {field.name: field for field in written_fields(kinds[kind])}
    unknown = [name for name in data if name not in fields]
    if unknown:
        raise ConfigurationError(f"{kind} has no field {shown(unknown[0])}; {allowed_names(unknown[0], fields)}")
    missing = [name for name, field in fields.items() if field.default is dataclasses.MISSING and name not in data]
    if missing:
        raise ConfigurationError(
            f"{kind} needs the field {shown(missing[0])}, which is missing in {shown(data)}; add it."
        )
    return kinds[kind](**{name: from_json(value, kinds) for name, value in data.items()})


def unknown_pattern(name: Any, names: Mapping[str, Any]) -> ConfigurationError:
    """Return the error for a name that is not among the names of patterns."""
    return ConfigurationError(
        f"No pattern is called {shown(name)}; {allowed_names(name, names)} If it is your own class, first import the "
        "module that defines it (on the command line: --import MODULE)."
    )


def allowed_names(name: Any, names: Mapping[str, Any]) -> str:
    """Return the end of a message about an unknown `name`: the allowed names, and the one that was probably meant."""
    allowed = f"allowed are {', '.join(sorted(names)) or 'none'}."
    nearest = get_close_matches(shown(name).strip("'"), names, n=1)
    return f"{allowed} Did you mean {shown(nearest[0])}?" if nearest else allowed


def written_fields(pattern: Any) -> list[dataclasses.Field[Any]]:
    """Return the fields of a pattern or its class that are written: those that take part in comparisons."""
    return [field for field in dataclasses.fields(pattern) if field.compare]
