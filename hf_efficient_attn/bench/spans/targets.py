"""What the timings of `bench spans` say: ratios between models, and the targets they are held against."""

from collections.abc import Iterator
from typing import Any

from hf_efficient_attn.bench.harness.timing import summarize
from hf_efficient_attn.bench.spans.cases import ADAPTIVE, DENSE, DYNAMIC, FIXED, FROZEN

Row = dict[str, Any]
# whose time over that of which model
RATIOS = (
    (ADAPTIVE, FIXED),
    (FROZEN, FIXED),
    (DYNAMIC, ADAPTIVE),
    (DYNAMIC, FIXED),
    (ADAPTIVE, DENSE),
    (FIXED, DENSE),
)
# most times that the time ratio may be the ratio of multiply-adds
MOST_OVER_FLOPS = 1.3
TRAINING, DECODE = "training", "decode_"


def decode_measure(num_texts: int) -> str:
    """Return the name of the measure of decoding so many texts side by side."""
    return f"{DECODE}{num_texts}"


def title_of(measure: str) -> str:
    """Return what a measure is called in tables.

    >>> title_of("training"), title_of("decode_1"), title_of("decode_8")
    ('training step', 'decode step of 1 text', 'decode step of 8 texts')
    """
    if measure == TRAINING:
        return "training step"
    num_texts = int(measure.removeprefix(DECODE))
    return f"decode step of {num_texts} text{'s' if num_texts > 1 else ''}"


def add_ratios(rows: list[Row]) -> None:
    """Write `time_over`, {other model: {measure: quartiles}}, and `flops_over`, {other model: ratio}, into all rows.

    Rounds are compared one by one; below 1 = this model is cheaper than the other.
    """
    found = {(row["positions"], row["limit"], row["model"]): row for row in rows}
    for row in rows:
        names = [other for name, other in RATIOS if name == row["model"]]
        places = {name: (row["positions"], row["limit"], name) for name in names}
        others = {name: found[place] for name, place in places.items() if place in found}
        row["time_over"] = {name: _time_over(row, other) for name, other in others.items()}
        row["flops_over"] = {name: row["flops_per_token"] / other["flops_per_token"] for name, other in others.items()}


def _time_over(row: Row, other: Row) -> dict[str, dict[str, float]]:
    return {
        measure: summarize([a / b for a, b in zip(times["samples"], other["times"][measure]["samples"], strict=True)])
        for measure, times in row["times"].items()
    }


def targets(rows: list[Row]) -> Iterator[tuple[str, str, str, bool]]:
    """Yield (what, target, measured, whether it is reached) for the adaptive model against the fixed one."""
    found = {(row["positions"], row["limit"], row["model"]): row for row in rows}
    for row in rows:
        if row["model"] != ADAPTIVE or FIXED not in row["time_over"]:
            continue
        where = f"{row['positions']}, limit {row['limit']:,}"
        flops = row["flops_over"][FIXED]
        for measure, ratios in row["time_over"][FIXED].items():
            ratio, most = ratios["median"], MOST_OVER_FLOPS * flops
            yield (
                f"{where}: {title_of(measure)}, time over fixed",
                f"at most {MOST_OVER_FLOPS} x {flops:.2f} = {most:.2f}",
                f"{ratio:.2f}",
                ratio <= most,
            )
        peaks = [each["peak_memory_bytes"] for each in (row, found[row["positions"], row["limit"], FIXED])]
        if None not in peaks:
            share = peaks[0] / peaks[1]
            yield f"{where}: peak memory of training over fixed", "below 1", f"{share:.2f}", share < 1
