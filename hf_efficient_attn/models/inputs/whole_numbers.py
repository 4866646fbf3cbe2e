"""Lists of whole numbers as users have them: of Python, numpy or torch."""

import operator
from collections.abc import Mapping, Set, Sized
from typing import Any


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

    >>> whole_numbers((3, 7)), whole_numbers((3, 7.0)), whole_numbers(3)
    ([3, 7], None, None)
    """
    held = entries(given)
    try:
        return None if held is None else [operator.index(each) for each in held]
    except TypeError:
        return None
