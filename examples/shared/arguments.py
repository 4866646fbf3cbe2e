"""The command line of every script: what cannot be used is a UsageError, which a script prints as one line."""

import difflib
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from transformers import HfArgumentParser


class UsageError(ValueError):
    """An argument, or data it names, that cannot be used; the message says what is allowed."""


class _Parser(HfArgumentParser):
    """`HfArgumentParser` that leaves it to the script to print its errors."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}. --help lists every option.")


def parse_arguments(classes: Sequence[type], words: Sequence[str] | None = None) -> tuple[Any, ...]:
    """Return an instance of each dataclass, filled from the command line.

    Args:
        words: the command line without the script; None: that of this process.

    Raises:
        UsageError: an option that no class has, or a value that its class refuses.
    """
    parser = _Parser(classes)
    try:
        *parsed, unknown = parser.parse_args_into_dataclasses(words, return_remaining_strings=True)
    except UsageError:
        raise
    except (ImportError, OSError, ValueError) as error:  # of a class's __post_init__
        raise UsageError(str(error)) from error
    if unknown:
        option = next((word for word in unknown if word.startswith("-")), unknown[0]).partition("=")[0]
        known = [name for action in parser._actions for name in action.option_strings]
        raise UsageError(f"Unknown option {option}.{did_you_mean(option, known)} --help lists every option.")
    return tuple(parsed)


def parse_json_file(classes: Sequence[type], file: str) -> tuple[Any, ...]:
    """Return an instance of each dataclass, filled from a JSON file of their fields.

    Raises:
        UsageError: the file cannot be read, has a field that no class has, or a value that its class refuses.
    """
    try:
        return _Parser(classes).parse_json_file(json_file=file)
    except UsageError:
        raise
    except (OSError, ValueError, TypeError, AttributeError) as error:  # no file, no JSON, a value or not an object
        raise UsageError(f"{file}: {error}") from error


def check_window(attention_window: int) -> None:
    """Raise UsageError for a window that has no two sides of equal length."""
    if attention_window < 2 or attention_window % 2:
        raise UsageError(f"--attention_window {attention_window} must be even and at least 2.")


def did_you_mean(name: str, allowed: Iterable[str]) -> str:
    """Return a sentence on the allowed name that is nearest, if one is near.

    >>> did_you_mean("--max_stebs", ["--max_steps", "--seed"])
    " Did you mean '--max_steps'?"
    """
    close = difflib.get_close_matches(name, list(allowed), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""
