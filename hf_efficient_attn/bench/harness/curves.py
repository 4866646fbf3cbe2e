"""Times against lengths: how they grow, and from where on one is below another."""

import math
from typing import Any

Row = dict[str, Any]


def curve(rows: list[Row], measure: str) -> list[tuple[int, float]]:
    """Return (tokens, median milliseconds) of the timed rows, by length."""
    points = [(row["tokens"], row[measure]["milliseconds"]["median"]) for row in rows if "milliseconds" in row[measure]]
    return sorted(points)


def growth(points: list[tuple[int, float]]) -> float | None:
    """Return the factor per doubling of the length between the last two points.

    >>> growth([(128, 1.0), (1024, 2.0), (4096, 8.0)])
    2.0
    """
    if len(points) < 2:
        return None
    (short, small), (long, large) = points[-2:]
    return (large / small) ** (1 / math.log2(long / short))


def crossover(dense: list[tuple[int, float]], points: list[tuple[int, float]]) -> tuple[float, float] | None:
    """Return (tokens, milliseconds) from where on a curve stays below that of dense attention; None: nowhere.

    Between two lengths the place is interpolated on logarithmic axes.

    >>> crossover([(100, 1.0), (400, 16.0)], [(100, 4.0), (400, 4.0)])
    (200.0, 4.0)
    """
    known = dict(dense)
    shared = [(tokens, time, known[tokens]) for tokens, time in points if tokens in known]
    last_slower = max((index for index, (_, time, other) in enumerate(shared) if time > other), default=-1)
    if last_slower == len(shared) - 1:
        return None
    tokens, time, other = shared[last_slower + 1]
    if last_slower == -1:
        return float(tokens), time
    before, time_before, other_before = shared[last_slower]
    above, below = math.log(time_before / other_before), math.log(other / time)
    part = above / (above + below)
    return before * (tokens / before) ** part, time_before * (time / time_before) ** part
