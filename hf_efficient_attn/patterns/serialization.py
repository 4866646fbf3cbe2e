"""Patterns in JSON types, as they are saved in `config.json`: {"kind": "band", "left": 256, "right": 256}.

Fields of a pattern are integers, booleans, strings, None, patterns, and tuples of these. A field that takes no part in
comparisons is derived from the others and is not written.
"""

import dataclasses
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.messages import shown
from hf_efficient_attn.patterns.checks import MAX_DEPTH, MAX_PARTS


def write_pattern(pattern: Any) -> dict[str, Any]:
    """Return a pattern in JSON types; see `Pattern.to_dict`."""
    check_kind(pattern)
    return to_json(pattern)  # type: ignore[no-any-return]


def read_pattern(data: Any, kinds: Mapping[str, type]) -> Any:
    """Return the pattern that `write_pattern` wrote; see `Pattern.from_dict`. `kinds` maps kinds to classes."""
    if not isinstance(data, Mapping):
        raise ConfigurationError(f'A pattern is a dict such as {{"kind": "causal"}}, not {shown(data)}.')
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
        ConfigurationError: names its class.
    """
    if not pattern.kind:
        raise ConfigurationError(
            f"{type(pattern).__name__} is a subclass of Pattern without a kind, which configs and operators need to "
            "read it again. Write a pattern of your own as a KeyTable, KeyTable([[0], [0, 1], ...]), which lists the "
            "keys of every query."
        )


def check_nesting(data: Mapping[str, Any]) -> None:
    """Refuse dicts and lists that contain themselves, or more than patterns can; they are checked level by level.

    Raises:
        ConfigurationError: reading the dict would never end, or take too long.
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
        f"A pattern holds at most {MAX_PARTS} others, at most {MAX_DEPTH} deep; {shown(data)} has more, or holds "
        "itself. List the keys of every query in a key_table instead."
    )


def _parts(value: Any) -> list[Any]:
    """Return the dicts in the value of a field: a dict, a list of dicts, or a list of lists without dicts."""
    if isinstance(value, Mapping):
        return [value]
    listed = value if isinstance(value, list | tuple) else ()
    rows = [entry for entry in listed if isinstance(entry, list | tuple)]
    if any(isinstance(entry, list | tuple | Mapping) for row in rows for entry in row):
        raise ConfigurationError(f"A field of a pattern is at most a list of lists of numbers, not {shown(value)}.")
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
            raise ConfigurationError(f"a pattern has no kind; {allowed_names(kind, kinds)}")
        raise ConfigurationError(
            f"no pattern is called {shown(kind)}; {allowed_names(kind, kinds)} If it is a class of your own, import "
            "the module that defines it first."
        )
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


def allowed_names(name: Any, names: Mapping[str, Any]) -> str:
    """Return the end of a message about an unknown `name`: which names are allowed, and which was probably meant."""
    allowed = f"allowed are {', '.join(sorted(names)) or 'none'}."
    nearest = get_close_matches(shown(name).strip("'"), names, n=1)
    return f"{allowed} Did you mean {shown(nearest[0])}?" if nearest else allowed


def written_fields(pattern: Any) -> list[dataclasses.Field[Any]]:
    """Return the fields of a pattern or its class that are written: those that take part in comparisons."""
    return [field for field in dataclasses.fields(pattern) if field.compare]
