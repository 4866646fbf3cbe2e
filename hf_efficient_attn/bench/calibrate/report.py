"""The costs of a machine, and how good the choices are, as tables."""

from typing import Any

from hf_efficient_attn.bench.calibrate.check import BOTH, FORWARD, Row
from hf_efficient_attn.bench.harness.report import machine_line, markdown_table

TITLES = {
    "key": "a key that a single query reads",
    "gathered": "a key and its value copied to their place",
    "moved": "a query moved to another order and back",
    "call": "one call that is computed in blocks",
    "run": "each of its kernels",
    "flex": "flex: a score",
}


def results_markdown(results: dict[str, Any]) -> str:
    """Return all tables, and one line on where the costs are kept."""
    parts = [f"# What attention costs: {results['calibration']['processor']['name']}", machine_line(results["machine"])]
    for heading, table in sections(results).items():
        parts += [f"## {heading}", table]
    if results["kept"] is None:
        reason = ""
        if results.get("rounds", 0) < results.get("least_rounds", 0):
            reason = f" {results['rounds']} rounds (--repeats) say too little: it takes {results['least_rounds']}."
        elif results.get("disagreement", 0) > results.get("most_disagreement", 0):
            reason = (
                f" The median round took {results['disagreement']:.0%} longer than the fastest, and may take "
                f"{results['most_disagreement']:.0%}: something else works on this machine. Measure while it is idle"
                f"{', or with --threads 1' if results['machine']['torch_threads'] > 1 else ''}."
            )
        return "\n\n".join([*parts, f"Nothing is kept: the costs in use are those {results['before']}.{reason}"])
    kept = f"Kept in {results['kept']}, and used on this machine from now on; before, they were {results['before']}."
    return "\n\n".join([*parts, kept])


def sections(results: dict[str, Any]) -> dict[str, str]:
    """Return the tables by their headings."""
    found = {"Times in scores of dense attention without a mask": costs_table(results["calibration"]["costs"])}
    for measure in (FORWARD, BOTH) if "check" in results else ():
        rows = [row for row in results["check"] if row["measure"] == measure]
        found[f'Time of "auto" over that of the fastest way, {measure}'] = check_table(rows)
    return found


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
        if any(each.get("is_widened") for each in passes.values()):
            computed = ["float32" if each["is_widened"] else dtype for dtype, each in passes.items()]
            rows.append([f"{direction}: computed in", *computed])
        rows += [[f"{direction}: a score with a mask", *(_figure(each["masked"]) for each in passes.values())]]
        rows += [[f"{direction}: by the explicit kernel", *(_figure(each["explicit"]) for each in passes.values())]]
    rows += [["dense attention, backward over forward", *(_figure(each["dense_backward"]) for each in costs.values())]]
    rows += [[title, *(_figure(each[name]) for each in costs.values())] for name, title in TITLES.items()]
    return markdown_table(["cost", *costs], rows)


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def check_table(rows: list[Row]) -> str:
    """Return a row per pattern, a column per length; what is more than 5% off has the fastest way beside it."""
    cells = {(row["pattern"], row["tokens"]): _choice(row) for row in rows}
    patterns, lengths = (list(dict.fromkeys(part)) for part in zip(*cells, strict=True))
    return markdown_table(
        ["pattern", *(f"{tokens:,}" for tokens in lengths)],
        # what was not tried in time has no figure
        [[name, *(cells.get((name, tokens), "–") for tokens in lengths)] for name in patterns],
    )


def _choice(row: Row) -> str:
    over = f"{row['over_fastest']:.2f}"
    return over if row["over_fastest"] <= 1.05 else f"{over} ({row['fastest']})"
