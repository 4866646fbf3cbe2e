"""The tables and the picture of `bench attention`."""

from collections.abc import Callable
from typing import Any

from hf_efficient_attn.bench.attention.overhead import overhead_table
from hf_efficient_attn.bench.attention.summary import PASSES, Row, by_contestant, crossover, curve, growth
from hf_efficient_attn.bench.harness.panels import label_decades
from hf_efficient_attn.bench.harness.report import machine_line, markdown_table
from hf_efficient_attn.bench.harness.timing import LEAST_ROUNDS
from hf_efficient_attn.pictures import new_figure

MEBIBYTE = 2**20
TITLES = {"forward": "forward", "forward_backward": "forward + backward"}
COLORS = ("#4477aa", "#ee8866", "#44bb99", "#aa3377", "#ccbb44", "#66ccee", "#bbbbbb")
LINES = ("-", "--", ":", "-.")
MARKERS = "ovs^Dp*hX"
NONE = "–"


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
    beyond = "Beyond SDPA: forward, on the same tensors, with a mask made beforehand. " if "overhead" in results else ""
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


def results_figure(results: dict[str, Any]) -> Any:
    """Return the picture: time and efficiency against length, forward, and forward + backward."""
    settings = results["settings"]
    figure = new_figure(13, 9.5)
    panels = figure.subplots(2, 2, sharex=True)
    for column, (measure, title) in enumerate(TITLES.items()):
        times, shares = panels[:, column]
        _draw_dense(times, results["dense"], measure)
        for pattern, contestant, rows in by_contestant(results["results"]):
            style = _style(settings, pattern, contestant)
            _draw_times(times, results["dense"], rows, measure, style)
            points = [(row["tokens"], row[measure]["efficiency"]) for row in rows if "efficiency" in row[measure]]
            if points:
                shares.plot([tokens for tokens, _ in points], [100 * share["median"] for _, share in points], **style)
        times.set_title(title.capitalize())
        times.set_xscale("log", base=2)
        times.set_yscale("log")
        times.set_ylabel("milliseconds")
        label_decades(times)
        shares.set_ylabel("useful-pair efficiency (%)")
        shares.set_ylim(bottom=0)
        shares.set_xlabel("tokens")
        shares.set_xticks(settings["lengths"], [f"{tokens:,}" for tokens in settings["lengths"]], rotation=40)
        shares.minorticks_off()
        for panel in (times, shares):
            panel.grid(color="#dddddd", linewidth=0.6)
            panel.spines[["top", "right"]].set_visible(False)
    labels = panels[0, 0].get_legend_handles_labels()
    # long enough to tell dashes from a line
    figure.legend(*labels, loc="outside right upper", fontsize=8, handlelength=4.5, numpoints=1)
    figure.suptitle(
        f"Attention, {settings['batch_size']} × {settings['heads']} heads of {settings['head_dim']}, "
        f"{settings['dtype']}; rings: faster than dense from here on\n{machine_line(results['machine'])}",
        fontsize=11,
    )
    return figure


def _draw_dense(panel: Any, dense: list[Row], measure: str) -> None:
    """Draw dense attention in black, dashed where it is extrapolated."""
    measured = curve([row for row in dense if "is_extrapolated" not in row[measure]], measure)
    everything = curve(dense, measure)
    style = {"color": "black", "linewidth": 2}
    if measured:
        panel.plot(*zip(*measured, strict=True), **style, label="dense")
        if len(everything) > len(measured):
            rest = everything[len(measured) - 1 :]
            panel.plot(*zip(*rest, strict=True), **style, linestyle=(0, (2, 2)), label="dense, extrapolated")


def _draw_times(panel: Any, dense: list[Row], rows: list[Row], measure: str, style: dict[str, Any]) -> None:
    """Draw one curve, and a ring where it crosses that of dense attention."""
    points = curve(rows, measure)
    if not points:
        return
    panel.plot(*zip(*points, strict=True), **style)
    place = crossover(curve(dense, measure), points)
    if place is not None and style["linestyle"] != "none":
        panel.plot(*place, marker="o", markersize=11, fillstyle="none", color=style["color"], markeredgewidth=1.8)


def _style(settings: dict[str, Any], pattern: str, contestant: str) -> dict[str, Any]:
    """Return how a curve is drawn: patterns differ by colour, our backends by line; peers have markers alone."""
    style = {"color": COLORS[settings["patterns"].index(pattern) % len(COLORS)], "label": f"{pattern}, {contestant}"}
    if contestant in settings["backends"]:
        line = LINES[settings["backends"].index(contestant) % len(LINES)]
        return {**style, "linestyle": line, "marker": ".", "linewidth": 1.6}
    marker = MARKERS[settings["peers"].index(contestant) % len(MARKERS)]
    return {**style, "linestyle": "none", "marker": marker, "markersize": 5, "alpha": 0.8}
