"""What the timings of `bench attention` say: speed against dense attention, and efficiency."""

from collections.abc import Iterator
from typing import Any

from hf_efficient_attn.bench.harness.timing import times_faster

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
    speeds = times_faster(ours, theirs)
    row[measure]["speed_against_dense"] = speeds
    if measure in PASSES:
        share = density(row)
        row[measure]["efficiency"] = {name: speed * share for name, speed in speeds.items()}


def density(row: Row) -> float:
    """Return the share of all pairs that the pattern allows."""
    return row["allowed_pairs"] / (row["num_heads"] * row["tokens"] ** 2)  # type: ignore[no-any-return]


def by_contestant(rows: list[Row]) -> Iterator[tuple[str, str, list[Row]]]:
    """Yield (pattern, contestant, its rows), in the order of their first appearance by pattern."""
    patterns = dict.fromkeys(row["pattern"] for row in rows)
    for pattern in patterns:
        of_pattern = [row for row in rows if row["pattern"] == pattern]
        for contestant in dict.fromkeys(row["contestant"] for row in of_pattern):
            yield pattern, contestant, [row for row in of_pattern if row["contestant"] == contestant]
