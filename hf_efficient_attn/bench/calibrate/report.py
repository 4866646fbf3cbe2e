"""The costs of a machine, and how good the choices are, as tables."""

from typing import Any

from hf_efficient_attn.bench.calibrate.check import BOTH, FORWARD, Row
from hf_efficient_attn.bench.harness.report import machine_line, markdown_table

TITLES = {
    "key": "a key that a single query reads",
    "gathered": "a key and its value copied to their place",
    "moved": "a query moved to another order and back",
    "run": "one call of a kernel",
    "flex": "flex: a score",
}


def results_markdown(results: dict[str, Any]) -> str:
    """Return all tables, and one line on where the costs are kept."""
    calibration = results["calibration"]
    lines = [f"*{machine_line(results['machine'])}*", "", "Times in scores of dense attention without a mask:", ""]
    lines += [costs_table(calibration["costs"]), ""]
    if results["kept"] is None:
        lines += [f"Nothing is kept: costs are those {results['before']}."]
    else:
        lines += [f"Kept in {results['kept']}, and used here from now on; before, they were {results['before']}."]
    for measure in (FORWARD, BOTH) if "check" in results else ():
        rows = [row for row in results["check"] if row["measure"] == measure]
        lines += ["", f'Time of "auto" over that of the fastest of all backends and lengths of blocks, {measure}:', ""]
        lines += [check_table(rows)]
    return "\n".join(lines)


def costs_table(costs: dict[str, Any]) -> str:
    """Return a row per cost, a column per dtype."""
    rows = []
    for direction in ("forward", "backward"):
        passes = {dtype: each[direction] for dtype, each in costs.items()}
        listed = {dtype: dict(each["blocks"]["per_score"]) for dtype, each in passes.items()}
        lengths = sorted({tokens for each in listed.values() for tokens in each})
        rows += [
            [f"{direction}: a score in blocks of {tokens}", *(_figure(each.get(tokens)) for each in listed.values())]
            for tokens in lengths
        ]
        rows += [[f"{direction}: a score with a mask", *(_figure(each["masked"]) for each in passes.values())]]
        rows += [[f"{direction}: by the explicit kernel", *(_figure(each["explicit"]) for each in passes.values())]]
    rows += [["dense attention, backward over forward", *(_figure(each["dense_backward"]) for each in costs.values())]]
    rows += [[title, *(_figure(each[name]) for each in costs.values())] for name, title in TITLES.items()]
    return markdown_table(["cost", *costs], rows)


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def check_table(rows: list[Row]) -> str:
    """Return a row per pattern, a column per length; the fastest way beside what is more than 5% off."""
    cells = {(row["pattern"], row["tokens"]): _choice(row) for row in rows}
    patterns, lengths = (list(dict.fromkeys(part)) for part in zip(*cells, strict=True))
    return markdown_table(
        ["pattern", *(f"{tokens:,}" for tokens in lengths)],
        [[name, *(cells[name, tokens] for tokens in lengths)] for name in patterns],
    )


def _choice(row: Row) -> str:
    over = f"{row['over_fastest']:.2f}"
    return over if row["over_fastest"] <= 1.05 else f"{over} ({row['fastest']})"
