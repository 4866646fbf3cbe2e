"""Checks of options that several experiments share."""

from collections.abc import Iterable, Sequence


def known_once(option: str, values: Sequence[str], known: Iterable[str]) -> list[str]:
    """Return the values of an option in their order, each once.

    >>> known_once("kinds", ["full", "local", "full"], ("local", "full"))
    ['full', 'local']

    Raises:
        SystemExit: one of them is not known.
    """
    allowed = list(known)
    for value in values:
        if value not in allowed:
            raise SystemExit(f"--{option} {value} is unknown. Allowed: {', '.join(allowed)}.")
    return list(dict.fromkeys(values))
