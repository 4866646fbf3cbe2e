"""What the timings of `bench content` say: ratios between layers, and the targets they are held against."""

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from hf_efficient_attn.bench.content.cases import BLOCKS, DENSE, IN_TREE, REFORMER, ROUTING
from hf_efficient_attn.bench.content.depth import REVERSIBLE
from hf_efficient_attn.bench.harness.curves import crossover, curve
from hf_efficient_attn.bench.harness.steps import MEASURES
from hf_efficient_attn.bench.harness.timing import times_faster

Row = dict[str, Any]
Target = tuple[str, str, str, bool]
# how many times as fast as transformers' layer, and at which length
LEAST_SPEED, SPEED_TOKENS = 3.0, 4096
# from which length on a layer is to be faster than dense attention
MOST_CROSSOVER = {REFORMER: 4096, ROUTING: 8192, BLOCKS: 8192}
# time per doubling of the length, from where on
MOST_GROWTH, GROWTH_FROM = 2.2, 8192
# memory of the deepest stack over that of the flattest
MOST_DEPTH_GROWTH = 1.1


def add_ratios(rows: list[Row]) -> None:
    """Write `speed_against`, {other layer: quartiles}, into all timed measures: how many times as fast as the other.

    Rounds are compared one by one. The others are dense attention and transformers' Reformer.
    """
    found = {(row["tokens"], row["layer"]): row for row in rows}
    for row in rows:
        for measure in MEASURES:
            others = {name: found.get((row["tokens"], name), {}).get(measure, {}) for name in (DENSE, IN_TREE)}
            own = row[measure].get("samples")
            if own is not None:
                row[measure]["speed_against"] = {
                    name: times_faster(own, other["samples"])
                    for name, other in others.items()
                    if name != row["layer"] and "samples" in other
                }


def rows_of(rows: list[Row], layer: str) -> list[Row]:
    """Return the rows of a layer."""
    return [row for row in rows if row["layer"] == layer]


def crossover_of(rows: list[Row], layer: str, measure: str) -> float | None:
    """Return the length from which on a layer is faster than dense attention; None: at none that was measured."""
    found = crossover(curve(rows_of(rows, DENSE), measure), curve(rows_of(rows, layer), measure))
    return None if found is None else found[0]


def highest_growth(points: list[tuple[int, float]]) -> tuple[float, int, int] | None:
    """Return the highest factor per doubling from `GROWTH_FROM` on, and between which two lengths; None: no two.

    >>> highest_growth([(4096, 1.0), (8192, 3.0), (16384, 6.0), (65536, 27.0)])
    (2.1213203435596424, 16384, 65536)
    """
    long_ones = [point for point in points if point[0] >= GROWTH_FROM]
    found = [((b / a) ** (1 / math.log2(more / less)), less, more) for (less, a), (more, b) in pairwise(long_ones)]
    return max(found, default=None)


def targets(rows: list[Row], depth: list[Row]) -> Iterator[Target]:
    """Yield (what, target, measured, whether it is reached) for the targets whose layers and lengths were measured."""
    yield from _speed_target(rows)
    for layer, most in MOST_CROSSOVER.items():
        for measure in MEASURES:
            yield from _crossover_target(rows, layer, measure, most)
    for layer in MOST_CROSSOVER:
        for measure in MEASURES:
            found = highest_growth(curve(rows_of(rows, layer), measure))
            if found is not None:
                growth, less, more = found
                what = f"{layer}, {MEASURES[measure]}: time per doubling, {less:,} to {more:,} tokens"
                yield what, f"at most {MOST_GROWTH} x", f"{growth:.2f} x", growth <= MOST_GROWTH
    yield from _depth_target(depth)


def _speed_target(rows: list[Row]) -> Iterator[Target]:
    for row in rows_of(rows, REFORMER):
        speed = row["training"].get("speed_against", {}).get(IN_TREE)
        if row["tokens"] == SPEED_TOKENS and speed is not None:
            what = f"{REFORMER}, training step at {SPEED_TOKENS:,} tokens: speed against {IN_TREE}"
            ratio = speed["median"]
            yield what, f"at least {LEAST_SPEED:g} x", f"{ratio:.2f} x", ratio >= LEAST_SPEED


def _crossover_target(rows: list[Row], layer: str, measure: str, most: int) -> Iterator[Target]:
    # what was not timed at such a length, or not beside dense attention, can be neither reached nor missed
    timed = [{tokens for tokens, _ in curve(rows_of(rows, name), measure)} for name in (layer, DENSE)]
    if most in timed[0] & timed[1]:
        tokens = crossover_of(rows, layer, measure)
        what = f"{layer}, {MEASURES[measure]}: faster than {DENSE} from"
        shown = "not reached" if tokens is None else f"{tokens:,.0f} tokens"
        yield what, f"at most {most:,} tokens", shown, tokens is not None and tokens <= most


def _depth_target(depth: list[Row]) -> Iterator[Target]:
    peaks = {row["layers"]: row["peak_memory_bytes"] for row in depth if row["stack"] == REVERSIBLE}
    if len(peaks) > 1:
        flat, deep = min(peaks), max(peaks)
        ratio = peaks[deep] / peaks[flat]
        what = f"reversible stack: peak memory of {deep} layers over that of {flat}"
        yield what, f"at most {MOST_DEPTH_GROWTH} x", f"{ratio:.2f} x", ratio <= MOST_DEPTH_GROWTH
