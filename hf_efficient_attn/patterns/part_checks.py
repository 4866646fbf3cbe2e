"""Checks of the patterns that another pattern holds."""

from collections.abc import Iterable
from itertools import islice
from typing import Any

from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.messages import shown
from hf_efficient_attn.patterns.checks import MAX_DEPTH, MAX_PARTS
from hf_efficient_attn.patterns.pattern import Pattern
from hf_efficient_attn.patterns.serialization import check_kind


def check_patterns(kind: str, patterns: Any) -> tuple[Pattern, ...]:
    """Return `patterns`, one or more patterns, as a tuple.

    Raises:
        ConfigurationError: there is none, or one is not a pattern.
    """
    listed = tuple(islice(patterns, MAX_PARTS + 1)) if isinstance(patterns, Iterable) else ()
    if not 0 < len(listed) <= MAX_PARTS:
        raise ConfigurationError(f"{kind}: patterns is {shown(patterns)}; give a list of 1 to {MAX_PARTS} patterns.")
    for pattern in listed:
        check_is_pattern(kind, pattern)
    check_size(kind, listed)
    return listed


def check_pattern(kind: str, pattern: Any) -> None:
    """Refuse anything that is not a pattern, and a pattern that is too large to be part of another.

    Raises:
        ConfigurationError: names the kind of the pattern that should hold it.
    """
    check_is_pattern(kind, pattern)
    check_size(kind, (pattern,))


def check_size(kind: str, parts: tuple[Pattern, ...]) -> None:
    """Refuse parts that are nested too deep, or too many in all, to compute anything in reasonable time.

    Raises:
        ConfigurationError: names the kind of the pattern that should hold them.
    """
    depth, num_parts = 0, 0
    level = parts
    while level:
        depth, num_parts = depth + 1, num_parts + len(level)
        if depth > MAX_DEPTH or num_parts > MAX_PARTS:
            raise ConfigurationError(
                f"{kind} would hold more than {MAX_PARTS} patterns, or nest them more than {MAX_DEPTH} deep. List the "
                "keys of every query in a KeyTable instead."
            )
        level = tuple(inner for part in level for inner in part.parts)


def check_is_pattern(kind: str, pattern: Any) -> None:
    """Refuse anything that is not a pattern.

    Raises:
        ConfigurationError: names the kind of the pattern that should hold it.
    """
    if not isinstance(pattern, Pattern):
        raise ConfigurationError(f"{kind} is made of patterns, such as Causal(); {shown(pattern)} is none.")
    if pattern.chooses_by_content:
        raise ConfigurationError(
            f"{kind} cannot hold {shown(pattern)}, which chooses keys by their content and stands for a whole layer. "
            "Give it layers of its own, by a list of one pattern per layer."
        )
    check_kind(pattern)
