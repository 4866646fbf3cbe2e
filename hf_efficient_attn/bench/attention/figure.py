"""The picture of `bench attention`: a column for each pattern, time above, efficiency below."""

from collections.abc import Iterator
from textwrap import shorten
from typing import Any

from hf_efficient_attn.bench.attention.summary import PASSES, Row, by_contestant
from hf_efficient_attn.bench.harness.curves import curve
from hf_efficient_attn.bench.harness.panels import label_decades
from hf_efficient_attn.bench.harness.report import machine_line
from hf_efficient_attn.pictures import new_figure

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
PASS_TITLES = {"forward_backward": "forward + backward", "forward": "forward"}


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
        panel.set_ylabel(f"{PASS_TITLES[measure]}\n(milliseconds)")
        label_decades(panel)
    panels[-1, 0].set_ylabel("useful-pair efficiency (%)")
    panels[-1, 0].set_ylim(bottom=0)
    handles = _legend(figure)
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
        panel.plot([], [], color="#666666", linestyle=line, label=f"efficiency, {PASS_TITLES[measure]}")


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


def _legend(figure: Any) -> dict[str, Any]:
    """Return what the panels show, by its label, each once."""
    handles: dict[str, Any] = {}
    for panel in figure.axes:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    return handles
