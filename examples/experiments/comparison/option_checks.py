"""What several experiments ask of their options."""

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


def check_window(tokens: int) -> None:
    """End with a sentence unless `--attention_window` has as many tokens on either side."""
    if tokens < 2 or tokens % 2:
        raise SystemExit(f"--attention_window {tokens} must be even and at least 2.")
