"""Patterns as JSON types, the form in which they live in `config.json`: {"kind": "band", "left": 256, "right": 256}.

Fields of a pattern are integers, booleans, strings, None, patterns, and tuples of those. A field that takes no part in
comparisons is derived from the others and is not written.
"""

import dataclasses
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from hf_efficient_attn.errors import ConfigurationError


def to_json(value: Any) -> Any:
    """Return a pattern, or a value of a pattern's field, in JSON types."""
    if isinstance(value, tuple):
        return [to_json(entry) for entry in value]
    if dataclasses.is_dataclass(value):
        fields = {field.name: to_json(getattr(value, field.name)) for field in written_fields(value)}
        return {"kind": getattr(value, "kind", None), **fields}
    return value


def from_json(value: Any, kinds: Mapping[str, type]) -> Any:
    """Return what `to_json` was given; `kinds` says which class a kind is.

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
        problem = "a pattern has no kind" if kind is None else f"no pattern is called {kind!r}"
        raise ConfigurationError(f"{problem}; {allowed_names(kind, kinds)}")
    fields = {field.name: field for field in written_fields(kinds[kind])}
    unknown = [name for name in data if name not in fields]
    if unknown:
        raise ConfigurationError(f"{kind} has no field {unknown[0]!r}; {allowed_names(unknown[0], fields)}")
    missing = [name for name, field in fields.items() if field.default is dataclasses.MISSING and name not in data]
    if missing:
        raise ConfigurationError(f"{kind} needs the field {missing[0]!r}, which is missing in {data}; add it.")
    return kinds[kind](**{name: from_json(value, kinds) for name, value in data.items()})


def allowed_names(name: Any, names: Mapping[str, Any]) -> str:
    """Return the end of a message about the unknown `name`: what is allowed, and which of it was probably meant."""
    allowed = f"allowed are {', '.join(sorted(names)) or 'none'}."
    nearest = get_close_matches(str(name), names, n=1)
    return f"{allowed} Did you mean {nearest[0]!r}?" if nearest else allowed


def written_fields(pattern: Any) -> list[dataclasses.Field[Any]]:
    """Return the fields of a pattern, or of its class, that are written: those that take part in comparisons."""
    return [field for field in dataclasses.fields(pattern) if field.compare]
