"""Format user values of any size, and numbers of bytes, for messages."""

import warnings
from functools import lru_cache
from reprlib import Repr
from typing import Any

KIBIBYTE = 2**10


def shown(value: Any, letters: int = 120) -> str:
    """Return `repr(value)`, cut to about `letters` characters; fast for any value, however deep or large.

    >>> shown("band"), shown([1, None]), len(shown("a" * 10**6)) <= 120
    ("'band'", '[1, None]', True)
    >>> shown(10**5000)
    'an integer of 16610 bits'
    """
    return cut(_Shown(letters).repr(value), letters, letters // 4)


def shown_bytes(num_bytes: int) -> str:
    """Return a number of bytes as text, in bytes, KiB or MiB.

    >>> shown_bytes(512), shown_bytes(1536), shown_bytes(5 * 2**30)
    ('512 bytes', '1.50 KiB', '5,120.00 MiB')
    """
    if num_bytes < KIBIBYTE:
        return f"{num_bytes} bytes"
    if num_bytes < KIBIBYTE**2:
        return f"{num_bytes / KIBIBYTE:,.2f} KiB"
    return f"{num_bytes / KIBIBYTE**2:,.2f} MiB"


class _Shown(Repr):
    def __init__(self, letters: int) -> None:
        super().__init__()
        self.maxlevel = 4
        self.maxdict = self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = letters // 10
        self.maxstring = self.maxother = self.maxlong = letters

    def repr_int(self, number: int, level: int) -> str:
        # Python refuses to convert integers of thousands of digits to text
        return repr(number) if number.bit_length() <= 256 else f"an integer of {number.bit_length()} bits"


def cut(text: str, letters: int, letters_at_end: int) -> str:
    """Return `text`; if it is longer than `letters`, its middle is replaced by "…".

    >>> cut("one two three four", 11, 4)
    'one … four'
    """
    if len(text) <= letters:
        return text
    start, end = text[: letters - letters_at_end - 3], text[len(text) - letters_at_end :]
    # exactly one space on either side of the ellipsis
    return f"{start.rstrip()} … {end.lstrip()}"


@lru_cache(maxsize=256)
def warn_once(message: str) -> None:
    """Warn with this message, but only once."""
    warnings.warn(message, UserWarning, stacklevel=2)


def aligned(rows: list[list[str]]) -> list[str]:
    """Return the rows as lines with right-aligned columns.

    >>> aligned([["layer", "keys"], ["0", "1,024"]])
    ['layer   keys', '    0  1,024']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
