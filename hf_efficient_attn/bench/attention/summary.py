"""What the timings of `bench attention` say: efficiency, growth, crossover."""

import math
from collections.abc import Iterator
from typing import Any

from hf_efficient_attn.bench.harness.timing import summarize

PASSES = ("forward", "forward_backward")
Row = dict[str, Any]


def add_ratios(dense: list[Row], rows: list[Row]) -> None:
    """Write `speed_against_dense` and `efficiency` into every timed measure, and missing times into the dense rows.

    Times of dense attention that were not measured are extrapolated from the longest one that was, by the number of
    pairs, and marked `is_extrapolated`. Where both were measured, samples are compared round by round.
    """
    for measure in PASSES:
        extrapolate(dense, measure)
    by_tokens = {row["tokens"]: row for row in dense}
    for row in rows:
        for measure in (*PASSES, "decode"):
            other = by_tokens[row["tokens"]][measure]
            if "milliseconds" in row[measure] and "milliseconds" in other:
                add_ratio(row, measure, other)


def extrapolate(dense: list[Row], measure: str) -> None:
    """Write a time into the dense rows that are longer than the longest measured one."""
    measured = [row for row in dense if "milliseconds" in row[measure]]
    for row in dense:
        if measured and row["tokens"] > measured[-1]["tokens"]:
            factor = (row["tokens"] / measured[-1]["tokens"]) ** 2
            known = measured[-1][measure]["milliseconds"]
            times = {name: value * factor for name, value in known.items()}
            row[measure] = {"milliseconds": times, "is_extrapolated": True}


def add_ratio(row: Row, measure: str, dense: Row) -> None:
    """Write into a measure how much faster it is than dense attention, and for a pass its useful-pair efficiency."""
    ours = row[measure]["samples"]
    theirs = dense.get("samples") or [dense["milliseconds"]["median"]] * len(ours)
    speeds = summarize([their / own for own, their in zip(ours, theirs, strict=True)])
    row[measure]["speed_against_dense"] = speeds
    if measure in PASSES:
        share = density(row)
        row[measure]["efficiency"] = {name: speed * share for name, speed in speeds.items()}


def density(row: Row) -> float:
    """Return the share of all pairs that the pattern allows."""
    return row["allowed_pairs"] / (row["num_heads"] * row["tokens"] ** 2)  # type: ignore[no-any-return]


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


def by_contestant(rows: list[Row]) -> Iterator[tuple[str, str, list[Row]]]:
    """Yield (pattern, contestant, its rows), in the order of their first appearance by pattern."""
    patterns = dict.fromkeys(row["pattern"] for row in rows)
    for pattern in patterns:
        of_pattern = [row for row in rows if row["pattern"] == pattern]
        for contestant in dict.fromkeys(row["contestant"] for row in of_pattern):
            yield pattern, contestant, [row for row in of_pattern if row["contestant"] == contestant]
