"""The tables and the picture of `bench mechanisms`."""

from collections.abc import Callable
from math import log
from statistics import linear_regression
from typing import Any

from hf_efficient_attn.bench.harness.curves import crossover, curve
from hf_efficient_attn.bench.harness.panels import Line, Panel, draw_panels
from hf_efficient_attn.bench.harness.report import clock_line, machine_line, markdown_table
from hf_efficient_attn.bench.harness.steps import MEASURES
from hf_efficient_attn.bench.harness.timing import LEAST_ROUNDS
from hf_efficient_attn.bench.mechanisms.cases import DENSE, DENSE_LIMIT, MECHANISMS, SCORES_LIMIT

Row = dict[str, Any]
MEBIBYTE = 2**20
DECODING = "decoding"
# growth is that over the longest lengths, so many
LAST = 3
NONE = "–"
COLORS = ("#333333", "#4477aa", "#66ccee", "#228833", "#bbaa44", "#ee6677", "#aa3377", "#ee8866", "#44bb99", "#882255")
MARKERS = "os^vD"


def results_markdown(results: dict[str, Any]) -> str:
    """Return the tables and what the figures mean."""
    settings = results["settings"]
    parts = [f"# Ways to read a text: {caption(settings)}", machine_line(results["machine"])]
    for heading, table in sections(results).items():
        parts += [f"## {heading}", table]
    return "\n\n".join([*parts, legend(settings)])


def sections(results: dict[str, Any]) -> dict[str, str]:
    """Return the tables by their headings."""
    settings, rows = results["settings"], results["results"]
    timed = {**MEASURES, DECODING: "one more token"} if settings["is_causal"] else MEASURES
    found = {"Growth, and from where on dense attention is slower": _summary(rows, settings, timed)}
    for measure, called in timed.items():
        found[f"Milliseconds, {called}"] = _table(rows, settings, _time(measure))
    if any(row["peak_memory_bytes"] is not None for row in rows):
        found["Peak MiB of a training step beyond the weights"] = _table(rows, settings, _bytes("peak_memory_bytes"))
    if settings["is_causal"]:
        found["MiB of the cache behind the text"] = _table(rows, settings, _bytes("cache_bytes"))
    return found


def caption(settings: dict[str, Any]) -> str:
    """Return the shape of the models in a line."""
    direction = "causal" if settings["is_causal"] else "bidirectional"
    return (
        f"one {direction} layer, width {settings['hidden_size']}, {settings['heads']} heads, {settings['dtype']}, "
        f"batch {settings['batch_size']}"
    )


def legend(settings: dict[str, Any]) -> str:
    """Return what was measured."""
    about = "; ".join(f"{name}: {MECHANISMS[name].about.format(**settings)}" for name in settings["mechanisms"])
    return (
        f"{caption(settings).capitalize()}; from embeddings to the last hidden state, without dropout, with an MLP "
        "four times as wide but for the star. Training step: forward and backward. Growth: the power of the length "
        f"that times grow with over the {LAST} longest lengths, 1 is linear. Up to {settings['repeats']} rounds, as "
        f"many as fit into {settings['max_seconds']:g} seconds a length, at least {LEAST_ROUNDS}, after one that does "
        "not count; medians. "
        f"{clock_line(settings)}What a token reads: {about}. {limits(settings)}"
    )


def limits(settings: dict[str, Any]) -> str:
    """Return the sentences on what is left out of long texts."""
    texts = {DENSE_LIMIT: "that reads all pairs of tokens", SCORES_LIMIT: "that holds a score of each pair"}
    found = {text: settings[limit] for limit, text in texts.items() if limit in settings}
    return " ".join(f"What {text} is measured up to {tokens:,} tokens." for text, tokens in found.items())


def exponent(points: list[tuple[int, float]]) -> float | None:
    """Return the power of the length that a curve grows with over its last points; None: there are fewer than two.

    >>> round(exponent([(128, 7.0), (1024, 1.0), (2048, 4.0), (4096, 16.0)]), 6)
    2.0
    """
    last = points[-LAST:]
    if len(last) < 2:
        return None
    return linear_regression([log(tokens) for tokens, _ in last], [log(value) for _, value in last]).slope


def _rows_of(rows: list[Row], name: str) -> list[Row]:
    return [row for row in rows if row["mechanism"] == name]


def _summary(rows: list[Row], settings: dict[str, Any], timed: dict[str, str]) -> str:
    header = ["", *(cell for called in timed.values() for cell in (f"{called}: growth", "beats dense from"))]
    lines = []
    for name in settings["mechanisms"]:
        cells = [name]
        for measure in timed:
            points = curve(_rows_of(rows, name), measure)
            power, place = exponent(points), crossover(curve(_rows_of(rows, DENSE), measure), points)
            cells.append(NONE if power is None else f"{power:.2f}")
            cells.append(NONE if place is None or name == DENSE else f"{place[0]:,.0f}")
        lines.append(cells)
    return markdown_table(header, lines)


def _table(rows: list[Row], settings: dict[str, Any], cell: Callable[[Row], str]) -> str:
    lines = [[name, *map(cell, _rows_of(rows, name))] for name in settings["mechanisms"]]
    return markdown_table(["", *(f"{tokens:,}" for tokens in settings["lengths"])], lines)


def _time(measure: str) -> Callable[[Row], str]:
    return lambda row: f"{row[measure]['milliseconds']['median']:,.1f}" if row[measure] else NONE


def _bytes(name: str) -> Callable[[Row], str]:
    return lambda row: NONE if row[name] is None else f"{row[name] / MEBIBYTE:,.{2 if row[name] < MEBIBYTE else 0}f}"


def results_figure(results: dict[str, Any]) -> Any:
    """Return the picture: time of a training step, memory or the cache, and time of a token, against the length."""
    settings, rows = results["settings"], results["results"]
    panels = [_times("Training step", "training", rows, settings)]
    if settings["is_causal"]:
        panels.append(_times("One more token behind the text", DECODING, rows, settings))
        panels.append(_held("Cache behind the text", "cache_bytes", rows, settings))
    else:
        panels.append(_times("Forward", "forward", rows, settings))
        panels.append(_held("Peak memory of a training step", "peak_memory_bytes", rows, settings))
    heading = f"{caption(settings).capitalize()}\n{machine_line(results['machine'])}"
    return draw_panels(heading, panels, "tokens", settings["lengths"])


def _times(title: str, measure: str, rows: list[Row], settings: dict[str, Any]) -> Panel:
    lines = [_line(name, curve(_rows_of(rows, name), measure)) for name in settings["mechanisms"]]
    return Panel(title, "milliseconds", lines)


def _held(title: str, key: str, rows: list[Row], settings: dict[str, Any]) -> Panel:
    lines = []
    for name in settings["mechanisms"]:
        known = [row for row in _rows_of(rows, name) if row[key] is not None]
        lines.append(_line(name, [(row["tokens"], row[key] / MEBIBYTE) for row in known]))
    return Panel(title, "MiB", lines)


def _line(name: str, points: list[tuple[int, float]]) -> Line:
    place = list(MECHANISMS).index(name)
    style = {"color": COLORS[place % len(COLORS)], "marker": MARKERS[place % len(MARKERS)]}
    return Line(name, points, style)
