"""The tables of `bench attention`."""

from collections.abc import Callable, Iterator
from textwrap import shorten
from typing import Any

from hf_efficient_attn.bench.cases import overhead_table
from hf_efficient_attn.bench.report import (
    MEBIBYTE,
    NONE,
    Row,
    crossover,
    curve,
    growth,
    label_decades,
    machine_line,
    markdown_table,
)
from hf_efficient_attn.bench.timing import LEAST_ROUNDS, times_faster
from hf_efficient_attn.pictures import new_figure

PASSES = ("forward", "forward_backward")


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


TITLES = {"forward": "forward", "forward_backward": "forward + backward"}


def results_markdown(results: dict[str, Any]) -> str:
    """Return the tables, headline first, what could not be measured and why, and what the figures mean."""
    settings = results["settings"]
    title = f"Attention: {settings['batch_size']} × {settings['heads']} heads of {settings['head_dim']}"
    parts = [f"# {title}, {settings['dtype']}", machine_line(results["machine"])]
    for heading, table in sections(results).items():
        parts += [f"## {heading}", table]
    return "\n\n".join([*parts, _reasons([*results["dense"], *results["results"]]), _legend(results)])


def sections(results: dict[str, Any]) -> dict[str, str]:
    """Return the tables by their headings, headline first."""
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
    """Return a table with a column per length; lines without any figure are left out."""
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
    """Return what was not measured: contestant and sentence, and the passes it holds for."""
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
            "Beyond SDPA: forward, on the same tensors, with a mask made beforehand; a step writes a token into a "
            "layer of a cache that holds so many. "
        )
    seconds = f"{settings['max_seconds']:g} seconds a length"
    rounds = f"up to {settings['repeats']} interleaved rounds, as many as fit into {seconds}, at least {LEAST_ROUNDS}"
    return (
        "Useful-pair efficiency: allowed pairs per second over the pairs per second of torch's SDPA without a mask, in "
        f"the same round. Medians of {rounds}. *: extrapolated from the longest measured length by its pairs, "
        "and so are the ratios of that length. Growth: factor per doubling between the two longest lengths. Beats "
        "dense from: at this length and all longer ones. Layout: choosing a backend and building what it needs of the "
        "pattern with empty caches, at the longest length; once per length. Decoding: one query, the cache one token "
        f"longer every step, layouts built in every step. {beyond}`masked`: SDPA with the pattern as a mask made "
        "beforehand. "
        "`transformers_flex`: its mask made in every call; `_kernel`: beforehand; of patterns that differ by head, the "
        "first head's. In-tree layers: without projections."
    )


PANEL_INCHES = 2.6
LEAST_INCHES = 7.0
HEIGHT_INCHES = 8.6
TITLE_LETTERS = 30
COLORS = ("#4477aa", "#ee8866", "#44bb99", "#aa3377", "#ccbb44", "#66ccee", "#bbbbbb")
MARKERS = "osD^vpXh*"
PATTERNS = {
    "band": "Band",
    "longformer": "Longformer",
    "bigbird": "BigBird",
    "dilated": "Dilated",
    "causal_band": "Causal band",
    "full": "Full",
    "causal": "Causal",
}
NAMES = {
    "auto": "hea.attention",
    "flex": "flex_attention, compiled",
    "local_attention": "local-attention",
    "longformer_layer": "transformers' Longformer",
    "bigbird_layer": "transformers' BigBird",
}
# SDPA with a mask is as fast as without one: its curve would lie on that of dense attention
LEFT_OUT = ("masked",)
PASS_STYLES = {"forward_backward": "-", "forward": "--"}


def results_figure(results: dict[str, Any]) -> Any:
    """Return the picture: time of both passes and of the forward pass, and efficiency, by pattern against length."""
    settings = results["settings"]
    patterns = settings["patterns"]
    figure = new_figure(max(LEAST_INCHES, PANEL_INCHES * len(patterns) + 0.6), HEIGHT_INCHES)
    panels = figure.subplots(3, len(patterns), sharex=True, sharey="row", squeeze=False)
    for column, pattern in zip(panels.T, patterns, strict=True):
        column[0].set_title(PATTERNS.get(pattern, shorten(pattern, TITLE_LETTERS, placeholder=" …")))
        for panel, measure in zip(column, reversed(PASSES), strict=False):
            _draw_times(panel, results, pattern, measure)
        _draw_efficiency(column[-1], results, pattern)
        column[-1].set_xticks(settings["lengths"], [f"{tokens:,}" for tokens in settings["lengths"]], rotation=90)
        column[-1].set_xlabel("tokens")
        for panel in column:
            panel.grid(color="#dddddd", linewidth=0.6)
            panel.spines[["top", "right"]].set_visible(False)
            panel.tick_params(labelsize=8)
    for panel, measure in zip(panels[:, 0], reversed(PASSES), strict=False):
        panel.set_ylabel(f"{TITLES[measure]}\n(milliseconds)")
        label_decades(panel)
    panels[-1, 0].set_ylabel("useful-pair efficiency (%)")
    panels[-1, 0].set_ylim(bottom=0)
    handles = _labelled(figure)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, fontsize=9, handlelength=3.5)
    figure.suptitle(
        f"Attention, {settings['batch_size']} × {settings['heads']} heads of {settings['head_dim']}, "
        f"{settings['dtype']}\n{machine_line(results['machine'])}",
        fontsize=10,
    )
    return figure


def _draw_times(panel: Any, results: dict[str, Any], pattern: str, measure: str) -> None:
    """Draw a line for each contestant; dense attention in black, dotted where it is extrapolated."""
    dense = results["dense"]
    measured = curve([row for row in dense if "is_extrapolated" not in row[measure]], measure)
    everything = curve(dense, measure)
    style = {"color": "black", "linewidth": 1.6}
    if measured:
        panel.plot(*zip(*measured, strict=True), **style, label="dense SDPA")
        if len(everything) > len(measured):
            rest = everything[len(measured) - 1 :]
            panel.plot(*zip(*rest, strict=True), **style, linestyle=":", label="dense SDPA, extrapolated")
    for contestant, rows in _contestants(results, pattern):
        points = curve(rows, measure)
        if points:
            panel.plot(*zip(*points, strict=True), **_style(results["settings"], contestant))
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.minorticks_off()


def _draw_efficiency(panel: Any, results: dict[str, Any], pattern: str) -> None:
    """Draw the efficiency of the backends in both passes; that of peers is in the tables."""
    for contestant, rows in _contestants(results, pattern):
        if contestant not in results["settings"]["backends"]:
            continue
        for measure, line in PASS_STYLES.items():
            points = [(row["tokens"], row[measure]["efficiency"]) for row in rows if "efficiency" in row[measure]]
            if points:
                style = {**_style(results["settings"], contestant), "linestyle": line, "label": "_"}
                panel.plot([tokens for tokens, _ in points], [100 * share["median"] for _, share in points], **style)
    for measure, line in PASS_STYLES.items():
        panel.plot([], [], color="#666666", linestyle=line, label=f"efficiency, {TITLES[measure]}")


def _contestants(results: dict[str, Any], pattern: str) -> Iterator[tuple[str, list[Row]]]:
    for name, contestant, rows in by_contestant(results["results"]):
        if name == pattern and contestant not in LEFT_OUT:
            yield contestant, rows


def _style(settings: dict[str, Any], contestant: str) -> dict[str, Any]:
    """Return how a contestant is drawn, alike in all panels."""
    known = [name for name in (*settings["backends"], *settings["peers"]) if name not in LEFT_OUT]
    place = known.index(contestant)
    return {
        "color": COLORS[place % len(COLORS)],
        "marker": MARKERS[place % len(MARKERS)],
        "markersize": 3.5,
        "linewidth": 1.4,
        "label": NAMES.get(contestant, contestant),
    }


def _labelled(figure: Any) -> dict[str, Any]:
    """Return what the panels show, by its label, each once."""
    handles: dict[str, Any] = {}
    for panel in figure.axes:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    return handles
