"""What the timings of `bench models` say: ratios between encoders, and the targets they are held against."""

import math
from collections.abc import Iterator
from typing import Any

from hf_efficient_attn.bench.harness.timing import times_faster
from hf_efficient_attn.bench.models.cases import OURS, SELF_ONLY, THEIRS

Row = dict[str, Any]
# ours -> transformers' encoders that each is compared with, where both were measured
OPPONENTS = {
    "longformer": ("longformer", "bert"),
    "led": ("led",),
    "big_bird": ("big_bird", "bert"),
    "bert": ("bert",),
    SELF_ONLY: ("longformer", "big_bird", "bert"),
}
# (ours, theirs, tokens, least speed of a training step)
SPEED_TARGETS = (
    ("longformer", "longformer", 4096, 4.0),
    ("big_bird", "big_bird", 4096, 2.0),
    ("longformer", "bert", 512, 1 / 1.1),
    ("bert", "bert", 512, 1 / 1.1),
    ("longformer", "bert", 16384, 4.0),
)
MEMORY_TARGET = ("longformer", 4096, 0.5)
# most per doubling of the length; 2 is linear
GROWTH_TARGET = (("longformer", "led", "big_bird"), 2.05)


def add_ratios(rows: list[Row]) -> None:
    """Write `speed_against`, {architecture of transformers: {measure: quartiles}}, into the rows of ours.

    Rounds are compared one by one; above 1 = ours is faster.
    """
    theirs = {(row["model"], row["tokens"]): row for row in rows if row["by"] == THEIRS}
    for row in rows:
        if row["by"] == OURS:
            others = {name: theirs.get((name, row["tokens"])) for name in OPPONENTS[row["model"]]}
            row["speed_against"] = {name: _speeds(row, other) for name, other in others.items() if other is not None}


def _speeds(own: Row, other: Row) -> dict[str, dict[str, float]]:
    measures = [name for name in ("forward", "training") if "samples" in own[name] and "samples" in other[name]]
    return {name: times_faster(own[name]["samples"], other[name]["samples"]) for name in measures}


def targets(rows: list[Row]) -> Iterator[tuple[str, str, str, float | None, bool]]:
    """Yield (what, target, measured, bound, whether it is reached) for the targets whose encoders were measured.

    The bound is the speed that tokens reading only themselves have in the place of ours, or None.
    """
    found = {(row["model"], row["by"], row["tokens"]): row for row in rows}
    for ours, theirs, tokens, least in SPEED_TARGETS:
        speed = training_speed(found.get((ours, OURS, tokens)), theirs)
        if speed is not None:
            what = f"training step at {tokens:,}: {ours} here against {theirs} of transformers"
            bound = training_speed(found.get((SELF_ONLY, OURS, tokens)), theirs)
            yield what, f"at least {least:.2f} x", f"{speed:.2f} x", bound, speed >= least
    name, tokens, most = MEMORY_TARGET
    share = memory_share(found.get((name, OURS, tokens)), found.get((name, THEIRS, tokens)))
    if share is not None:
        what = f"peak memory at {tokens:,}: {name} here over transformers'"
        yield what, f"at most {most:.2f}", f"{share:.2f}", None, share <= most
    names, most = GROWTH_TARGET
    for name in names:
        growth = memory_growth([row for row in rows if row["model"] == name and row["by"] == OURS])
        if growth is not None:
            what = f"peak memory of {name} here, per doubling of the length"
            yield what, f"at most {most} x", f"{growth:.2f} x", None, growth <= most


def training_speed(own: Row | None, other: str) -> float | None:
    """Return the speed of our training step against that of transformers' `other`, or None where there is none."""
    speeds = own["speed_against"].get(other, {}) if own else {}
    return speeds["training"]["median"] if "training" in speeds else None


def memory_share(own: Row | None, other: Row | None) -> float | None:
    """Return our peak memory over theirs, or None where one was not measured."""
    if own is None or other is None or own["peak_memory_bytes"] is None or other["peak_memory_bytes"] is None:
        return None
    return own["peak_memory_bytes"] / other["peak_memory_bytes"]  # type: ignore[no-any-return]


def memory_growth(rows: list[Row]) -> float | None:
    """Return the factor of peak memory per doubling of the length, between the shortest and the longest measured.

    >>> memory_growth([{"tokens": 1024, "peak_memory_bytes": 1}, {"tokens": 4096, "peak_memory_bytes": 4}])
    2.0
    """
    points = sorted((row["tokens"], row["peak_memory_bytes"]) for row in rows if row["peak_memory_bytes"] is not None)
    if len(points) < 2:
        return None
    (short, small), (long, large) = points[0], points[-1]
    return (large / small) ** (1 / math.log2(long / short))  # type: ignore[no-any-return]
