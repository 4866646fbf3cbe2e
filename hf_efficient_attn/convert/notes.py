"""What a conversion tells its user: names of weights and fields that have no counterpart."""

import re
import warnings
from collections import Counter
from collections.abc import Iterable


def summarize(names: Iterable[str]) -> str:
    """Return names, those of layers that are alike once with their number.

    >>> summarize(["pooler.bias", "layers.0.norm.weight", "layers.1.norm.weight"])
    'pooler.bias, layers.*.norm.weight (2)'
    """
    counts = Counter(re.sub(r"\.\d+\.", ".*.", name) for name in names)
    return ", ".join(f"{name} ({count})" if "*" in name else name for name, count in counts.items())


def give(notes: Iterable[str]) -> None:
    """Warn of each note."""
    for note in notes:
        warnings.warn(note, UserWarning, stacklevel=3)
