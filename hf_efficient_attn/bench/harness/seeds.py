"""What several seeds reach: mean and standard deviation, and their text."""

from collections.abc import Sequence
from statistics import fmean, stdev


def over_seeds(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and the standard deviation; of one value the latter is 0."""
    return fmean(values), stdev(values) if len(values) > 1 else 0.0


def spread(values: Sequence[float], form: str = ".3f") -> str:
    """Return the mean and, of several seeds, the standard deviation.

    >>> spread([0.25, 0.75]), spread([0.5], ".1%")
    ('0.500 ± 0.354', '50.0%')
    """
    mean, deviation = over_seeds(values)
    return f"{mean:{form}} ± {deviation:{form}}" if len(values) > 1 else f"{mean:{form}}"
