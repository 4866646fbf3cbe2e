"""The tables and the picture of `bench attention`, and the ratios behind them."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from hf_efficient_attn.bench.cases import overhead_table
from hf_efficient_attn.bench.report import (
    MEBIBYTE,
    NONE,
    PALETTE,
    Line,
    Panel,
    Row,
    crossover,
    curve,
    draw_panels,
    growth,
    machine_line,
    markdown_table,
)
from hf_efficient_attn.bench.timing import LEAST_ROUNDS, times_faster

PASSES = ("forward", "forward_backward")
TITLES = {"forward": "forward", "forward_backward": "forward + backward"}
NAMES = {
    "auto": "hea.attention",
    "flex": "flex_attention, compiled",
    "local_attention": "local-attention",
    "longformer_layer": "transformers' Longformer",
    "bigbird_layer": "transformers' BigBird",
}
# SDPA with a mask is as fast as without one: its curve would lie on that of dense attention
LEFT_OUT = ("masked",)


def add_ratios(dense: list[Row], rows: list[Row]) -> None:
    """Write `speed_against_dense` and `efficiency` into every timed measure, and missing times into the dense rows.

    Missing times of dense attention are extrapolated from the longest measured length by the number of pairs, and
    marked `is_extrapolated`. If both were measured, samples are compared round by round.
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
    """Write extrapolated times into the dense rows beyond the longest measured length."""
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


def results_markdown(results: dict[str, Any]) -> str:
    """Return the tables, the main ones first, what could not be measured and why, and what the numbers mean."""
    settings = results["settings"]
    title = f"Attention: {settings['batch_size']} × {settings['heads']} heads of {settings['head_dim']}"
    parts = [f"# {title}, {settings['dtype']}", machine_line(results["machine"])]
    for heading, table in sections(results).items():
        parts += [f"## {heading}", table]
    return "\n\n".join([*parts, _reasons([*results["dense"], *results["results"]]), _legend(results)])


def sections(results: dict[str, Any]) -> dict[str, str]:
    """Return the tables by their headings, the main ones first."""
    settings, dense, rows = results["settings"], results["dense"], results["results"]
    every = [*dense, *rows]
    found = {
        f"Useful-pair efficiency, {title}": _grid(rows, settings, _share(measure)) for measure, title in TITLES.items()
    }
    found["Growth, crossover, layout"] = summary_table(dense, rows)
    for measure, title in TITLES.items():
        found[f"Milliseconds, {title}"] = _grid(every, settings, _time(measure))
        found[f"Speed against dense attention, {title}"] = _grid(rows, settings, _speed(measure))
    found["Milliseconds per decoding step"] = _grid(every, settings, _time("decode"))
    if "overhead" in results:
        found["Microseconds of a call beyond torch's SDPA"] = overhead_table(results["overhead"])
    if not settings["no_memory"]:
        found["Peak MiB, forward + backward, beyond the inputs"] = _grid(every, settings, _memory)
    return found


def _grid(rows: list[Row], settings: dict[str, Any], cell: Callable[[Row], str]) -> str:
    """Return a table with a column per length; lines without any value are left out."""
    lengths = settings["lengths"]
    lines = []
    for pattern, contestant, its_rows in by_contestant(rows):
        texts = {row["tokens"]: cell(row) for row in its_rows}
        if set(texts.values()) != {NONE}:
            lines.append([f"{pattern}, {contestant}", *(texts.get(tokens, NONE) for tokens in lengths)])
    return markdown_table(["pattern, by", *(f"{tokens:,}" for tokens in lengths)], lines)


def _time(measure: str) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        if "milliseconds" not in row[measure]:
            return NONE
        median = row[measure]["milliseconds"]["median"]
        text = f"{median:,.0f}" if median >= 100 else f"{median:.3g}"
        return f"{text}*" if "is_extrapolated" in row[measure] else text

    return cell


def _share(measure: str) -> Callable[[Row], str]:
    return lambda row: f"{row[measure]['efficiency']['median']:.0%}" if "efficiency" in row[measure] else NONE


def _speed(measure: str) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        return f"{row[measure]['speed_against_dense']['median']:.2f}" if "speed_against_dense" in row[measure] else NONE

    return cell


def _memory(row: Row) -> str:
    return NONE if row["peak_memory_bytes"] is None else f"{row['peak_memory_bytes'] / MEBIBYTE:,.0f}"


def summary_table(dense: list[Row], rows: list[Row]) -> str:
    """Return growth per doubling, the length from which dense attention is slower, and the cost of layouts."""
    header = ["pattern, by"]
    for title in TITLES.values():
        header += [f"{title}: growth", "beats dense from"]
    lines = []
    for pattern, contestant, its_rows in by_contestant(rows):
        line = [f"{pattern}, {contestant}"]
        for measure in PASSES:
            points = curve(its_rows, measure)
            factor, place = growth(points), crossover(curve(dense, measure), points)
            line.append(NONE if factor is None else f"{factor:.2f}×")
            line.append(NONE if place is None else f"{place[0]:,.0f}")
        if set(line[1:]) != {NONE}:
            lines.append([*line, layout_share(its_rows[-1]), chosen_backends(its_rows)])
    return markdown_table([*header, "layout / forward", "computed by"], lines)


def layout_share(row: Row) -> str:
    """Return the time to build the layout of a row, as a share of its forward pass."""
    if "layout_milliseconds" not in row:
        return NONE
    return f"{row['layout_milliseconds'] / row['forward']['milliseconds']['median']:.1%}"


def chosen_backends(rows: list[Row]) -> str:
    """Return the backends that computed the rows, by rising length.

    >>> chosen_backends([{"tokens": 128, "backend": "sdpa"}, {"tokens": 4096, "backend": "blocked"}])
    'sdpa, blocked from 4,096'
    """
    texts: list[str] = []
    last = None
    for row in rows:
        if "backend" in row and row["backend"] != last:
            texts.append(row["backend"] if last is None else f"{row['backend']} from {row['tokens']:,}")
            last = row["backend"]
    return ", ".join(texts) or NONE


def _reasons(rows: list[Row]) -> str:
    """Return what was not measured: contestant, passes and reason."""
    reasons: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        for measure, title in TITLES.items():
            if "reason" in row[measure]:
                reasons.setdefault((row["contestant"], row[measure]["reason"]), set()).add(title)
    lines = [
        f"- {contestant}, {' and '.join(sorted(passes))}: {reason}" for (contestant, reason), passes in reasons.items()
    ]
    return "\n".join(["Not measured:", "", *lines]) if lines else "Everything was measured."


def _legend(results: dict[str, Any]) -> str:
    settings = results["settings"]
    beyond = ""
    if "overhead" in results:
        beyond = (
            "Beyond SDPA: forward pass on the same tensors, with a mask made beforehand; a step writes one token into "
            "a cache layer that already holds that number of tokens. "
        )
    seconds = f"{settings['max_seconds']:g} seconds per length"
    rounds = f"up to {settings['repeats']} interleaved rounds, as many as fit into {seconds}, at least {LEAST_ROUNDS}"
    return (
        "Useful-pair efficiency: allowed pairs per second, divided by the pairs per second of torch's SDPA without a "
        f"mask in the same round. Medians of {rounds}. *: extrapolated from the longest measured length, in proportion "
        "to the number of pairs; ratios at that length use this value. Growth: factor of time per doubling of the "
        "length, between the two longest lengths. Beats dense from: at this length and all longer ones. Layout: time "
        "to choose a backend and build what it needs for the pattern, with empty caches, at the longest length; needed "
        "once per length. Decoding: one query; the cache grows by one token and layouts are built in every step. "
        f"{beyond}`masked`: SDPA with the pattern as a mask made beforehand. `transformers_flex` makes its mask in "
        "every call, `transformers_flex_kernel` beforehand; if a pattern differs by head, both use the pattern of the "
        "first head. The layers of Longformer and BigBird in transformers are timed without their projections."
    )


def results_figure(results: dict[str, Any]) -> Any:
    """Return the picture: a row per pattern with the times of forward + backward and of forward, and the efficiency."""
    settings = results["settings"]
    panels = []
    for pattern in settings["patterns"]:
        for measure in reversed(PASSES):
            lines = [*_dense_lines(results["dense"], measure), *_lines(results, pattern, partial(_times, measure))]
            panels.append(Panel(f"{pattern}, {TITLES[measure]}", "milliseconds", lines))
        panels.append(Panel(f"{pattern}, forward", "useful-pair efficiency (%)", _lines(results, pattern, _shares)))
    heading = (
        f"Attention, {settings['batch_size']} × {settings['heads']} heads of {settings['head_dim']}, "
        f"{settings['dtype']}\n{machine_line(results['machine'])}"
    )
    return draw_panels(heading, panels, "tokens", settings["lengths"])


def _dense_lines(dense: list[Row], measure: str) -> list[Line]:
    """Return the line of dense attention, and the part of it that is extrapolated."""
    everything = curve(dense, measure)
    measured = curve([row for row in dense if "is_extrapolated" not in row[measure]], measure)
    style = {"color": "black", "marker": "."}
    rest = everything[max(len(measured) - 1, 0) :] if len(everything) > len(measured) else []
    return [
        Line("dense SDPA", measured, style),
        Line("dense SDPA, extrapolated", rest, {**style, "linestyle": ":"}),
    ]


def _lines(results: dict[str, Any], pattern: str, points: Callable[[list[Row]], list[tuple[int, float]]]) -> list[Line]:
    """Return a line per contestant of a pattern, with the same style in all panels."""
    settings = results["settings"]
    known = [name for name in (*settings["backends"], *settings["peers"]) if name not in LEFT_OUT]
    return [
        Line(NAMES.get(by, by), points(rows), {"color": PALETTE[known.index(by) % len(PALETTE)], "marker": "o"})
        for name, by, rows in by_contestant(results["results"])
        if name == pattern and by in known
    ]


def _times(measure: str, rows: list[Row]) -> list[tuple[int, float]]:
    return curve(rows, measure)


def _shares(rows: list[Row]) -> list[tuple[int, float]]:
    timed = [row for row in rows if "efficiency" in row["forward"]]
    return [(row["tokens"], 100 * row["forward"]["efficiency"]["median"]) for row in timed]
