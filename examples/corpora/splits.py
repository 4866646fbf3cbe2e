"""One way to split every corpus: by the hash of a key, so that a row stays on its side whatever else there is."""

import hashlib
import re
from collections.abc import Callable, Hashable, Iterable
from typing import Any

Row = dict[str, Any]
Splits = dict[str, list[Row]]

SPLITS = ("train", "validation", "test")
HELD_OUT_EVERY = 10


def split_of(key: str) -> str:
    """Return the split of a key: about one in ten is "test", one in ten "validation", the others "train"."""
    remainder = int(hashlib.sha256(key.encode()).hexdigest(), 16) % HELD_OUT_EVERY
    return {0: "test", 1: "validation"}.get(remainder, "train")


def split_rows(rows: Iterable[Row], key: Callable[[Row], str]) -> Splits:
    """Return the rows by split, in their order; rows of equal key never end on two sides."""
    splits: Splits = {name: [] for name in SPLITS}
    for row in rows:
        splits[split_of(key(row))].append(row)
    return splits


def without_duplicates(rows: Iterable[Row], key: Callable[[Row], Hashable]) -> list[Row]:
    """Return the rows whose key was not seen before."""
    first: dict[Hashable, Row] = {}
    for row in rows:
        first.setdefault(key(row), row)
    return list(first.values())


def letters(text: str) -> str:
    """Return only the letters of a text, in lower case: what two copies share whatever their layout and numbers."""
    return re.sub(r"[\W\d_]+", "", text).lower()
