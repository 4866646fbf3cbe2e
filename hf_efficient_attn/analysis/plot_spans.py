"""Draw what `analyze spans` found: spans by layer, attention by distance, spans along a text, cost by span limit."""

from collections.abc import Sequence
from itertools import groupby
from math import ceil, floor, log10
from typing import Any

from hf_efficient_attn.analysis.span_report import SpanCost, SpanReport, TextSpans
from hf_efficient_attn.models.spans.module import ADAPTIVE, DYNAMIC, FIXED, FROZEN
from hf_efficient_attn.pictures import new_figure, plain_number

# Okabe & Ito's palette, told apart by colour-blind readers; markers differ too
STYLES = {
    FIXED: {"color": "#D55E00", "marker": "s"},
    ADAPTIVE: {"color": "#0072B2", "marker": "o"},
    DYNAMIC: {"color": "#009E73", "marker": "^"},
    FROZEN: {"color": "#56B4E9", "marker": "D"},
}
LAYER_COLORS = ("#0072B2", "#56B4E9")
SHORTEST, LONGEST = "#E69F00", "#0072B2"
PIXELS_PER_INCH = 130
# how many single characters, or longer tokens, have room on an axis, and how many letters of a token
AXIS_CHARACTERS, AXIS_TOKENS, LONGEST_LABEL = 110, 60, 14
# on a logarithmic axis a weight of 0 has no place; smaller ones are not shown either
SMALLEST_WEIGHT = 1e-6


def spans_figure(report: SpanReport, costs: Sequence[SpanCost], text: str) -> Any:
    """Return the picture of a report.

    Args:
        costs: of this model and those it is compared with; without any of these they are left out.
        text: what was read, as a picture names it; dynamic spans are those of this text.

    Raises:
        ImportError: matplotlib is not installed.
    """
    rows = [["spans", "weights"]]
    rows += [["text", "text"]] if report.along_text is not None else []
    rows += [["average", "flops"]] if len(costs) > 1 else []
    figure = new_figure(11, 3.4 * len(rows) + 0.5)
    panels = figure.subplot_mosaic(rows)
    _draw_spans(panels["spans"], report)
    _draw_weights(panels["weights"], report)
    if report.along_text is not None:
        _draw_text(panels["text"], report.along_text)
    if len(costs) > 1:
        over = "; dynamic: over the text" if any(cost.kind == DYNAMIC for cost in costs) else ""
        _draw_costs(panels["average"], costs, "average_span", f"Average span (ramp included{over})", "tokens")
        _draw_costs(panels["flops"], costs, "flops_per_token", "Cost of the layers", "multiply-adds per token")
    for panel in panels.values():
        panel.grid(axis="y", color="#DDDDDD", linewidth=0.6)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle(_heading(report.cost, text), fontsize=11)
    return figure


def _heading(cost: SpanCost, text: str) -> str:
    what = f"{cost.model}: {cost.kind} span, limit {cost.span_limit:,} tokens"
    amounts = f"heads read {cost.average_span:,.0f} tokens on average, {cost.max_span:,} at most"
    if cost.kind == DYNAMIC:
        return f"{what}\nOver {text}, {amounts}"
    return f"{what}; {amounts}\nAttention weights are those of {text}"


def _draw_spans(axis: Any, report: SpanReport) -> None:
    """Draw a bar for each head, sorted within its layer."""
    limit, ramp = report.cost.span_limit, min(report.ramp, report.cost.span_limit)
    for index, layer in enumerate(report.layers):
        width = 0.8 / len(layer.keys)
        places = [index - 0.4 + (rank + 0.5) * width for rank in range(len(layer.keys))]
        axis.bar(places, sorted(layer.keys), width * 0.85, color=LAYER_COLORS[index % 2])
    smallest = min(ramp, *(min(layer.keys) for layer in report.layers))
    axis.set_yscale("log", base=2)
    axis.set_ylim(smallest / 1.5, limit * 1.3)
    axis.yaxis.set_major_formatter("{x:,.0f}")
    axis.axhline(limit, color="#000000", linewidth=1, linestyle="--", label=f"limit, {limit:,}")
    if report.cost.kind != FIXED:
        axis.axhline(ramp, color="#888888", linewidth=1, linestyle=":", label=f"ramp alone (span 0), {ramp:,}")
    axis.set_xticks(range(len(report.layers)), [str(layer.layer) for layer in report.layers])
    axis.set_xlabel("layer (its heads from short to long)")
    axis.set_ylabel("keys a head reads" + ("" if report.is_causal else " on each side"))
    what = {FIXED: "", DYNAMIC: " (mean span over the text, ramp included)"}.get(report.cost.kind, " (ramp included)")
    axis.set_title(f"How far does each head read?{what}", fontsize=10)
    _legend(axis, columns=2)


def _draw_weights(axis: Any, report: SpanReport) -> None:
    """Draw the weights of two heads; what is below `SMALLEST_WEIGHT` has no place on a logarithmic axis."""
    mean = " on average" if report.cost.kind == DYNAMIC else ""
    names = (
        (f"longest{mean}", f"shortest{mean}") if report.longest.span > report.shortest.span else ("farthest", "nearest")
    )
    drawn = []
    for head, name, color in zip((report.longest, report.shortest), names, (LONGEST, SHORTEST), strict=True):
        points = [(distance, weight) for distance, weight in head.points() if weight >= SMALLEST_WEIGHT]
        label = f"{name} (layer {head.layer}, head {head.head}: {head.keys:,} keys)"
        axis.plot(*zip(*points, strict=True), ".-", color=color, linewidth=1.4, markersize=4, label=label)
        drawn += [weight for _, weight in points]
    axis.set_xscale("symlog", base=2, linthresh=1, linscale=0.5)
    axis.set_xlim(report.shortest.first_distance * 0.9, max(report.farthest, 2) * 1.1)
    axis.xaxis.set_major_formatter("{x:,.0f}")
    axis.set_yscale("log")
    axis.set_ylim(10 ** floor(log10(min(drawn, default=0.1))), 10 ** ceil(log10(max(drawn, default=0.1)) + 0.01))
    axis.set_xlabel("distance in tokens" + ("" if report.is_causal else ", both sides together"))
    axis.yaxis.set_major_formatter(plain_number)
    axis.yaxis.set_minor_formatter("")
    axis.set_ylabel("attention weight")
    axis.set_title(f"Where do two heads look? (mean over {report.num_queries:,} tokens)", fontsize=10)
    _legend(axis, columns=1 if mean else 2)


def _draw_text(axis: Any, text: TextSpans) -> None:
    """Draw the spans of the last tokens, which have most text before them."""
    is_wide = any(len(symbol) > 1 for symbol in text.symbols)
    room = AXIS_TOKENS if is_wide else AXIS_CHARACTERS
    spans, symbols = text.spans[-room:], [symbol[:LONGEST_LABEL] for symbol in text.symbols[-room:]]
    axis.plot(range(len(spans)), spans, ".-", color=STYLES[DYNAMIC]["color"], linewidth=1.2, markersize=4)
    axis.set_xticks(range(len(symbols)), symbols, rotation=90 if is_wide else 0, family="monospace", fontsize=8)
    axis.tick_params(axis="x", length=0)
    axis.set_xlim(-1, len(spans))
    for index, symbol in enumerate(symbols):
        if symbol.startswith(("␣", "↵")):
            axis.axvline(index, color="#EEEEEE", linewidth=4, zorder=0)
    axis.set_ylabel("mean dynamic span (tokens)")
    axis.set_title("Where in a text is more context read? (mean over layers and heads, ramp not included)", fontsize=10)


def _draw_costs(axis: Any, costs: Sequence[SpanCost], field: str, title: str, unit: str) -> None:
    """Draw a value against the span limit, a line for each kind of span; with one limit, a bar for each model."""
    kinds = list(STYLES)
    ordered = sorted(costs, key=lambda cost: (kinds.index(cost.kind), cost.span_limit))
    axis.set_title(title, fontsize=10)
    if len({cost.span_limit for cost in costs}) == 1:
        _draw_bars(axis, ordered, field, unit)
        return
    for kind, members in groupby(ordered, lambda cost: cost.kind):
        points = [(cost.span_limit, getattr(cost, field)) for cost in members]
        axis.plot(*zip(*points, strict=True), "-", **STYLES[kind], linewidth=1.4, markersize=6, label=kind)
    limits = sorted({cost.span_limit for cost in costs})
    axis.set_xscale("log", base=2)
    axis.set_xlim(limits[0] / 1.5, limits[-1] * 1.5)
    axis.set_xticks(limits, [f"{limit:,}" for limit in limits])
    axis.minorticks_off()
    axis.set_ylim(0, 1.15 * max(getattr(cost, field) for cost in costs))
    axis.yaxis.set_major_formatter(_engineering)
    axis.set_xlabel("span limit (tokens)")
    axis.set_ylabel(unit)
    _legend(axis, columns=4)


def _draw_bars(axis: Any, costs: Sequence[SpanCost], field: str, unit: str) -> None:
    for place, cost in enumerate(costs):
        amount = getattr(cost, field)
        axis.barh(place, amount, color=STYLES[cost.kind]["color"])
        text = f"{amount:,.0f}" if amount < 1e4 else _engineering(float(f"{amount:.3g}"))
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        axis.annotate(text, (amount, place), (5, 0), textcoords="offset points", va="center", bbox=box)
    is_alone = len({cost.kind for cost in costs}) == len(costs)
    axis.set_yticks(range(len(costs)), [cost.kind if is_alone else cost.model for cost in costs])
    axis.invert_yaxis()
    axis.margins(x=0.15)
    axis.xaxis.set_major_formatter(_engineering)
    axis.set_xlabel(f"{unit}; span limit {costs[0].span_limit:,}")


def _engineering(value: float, position: int | None = None) -> str:
    """Return a number with the letter of its thousands, as tick labels want it.

    >>> _engineering(41_600_000.0), _engineering(250.0), _engineering(0.0)
    ('41.6 M', '250', '0')
    """
    for size, letter in ((1e9, " G"), (1e6, " M"), (1e4, " k")):
        if abs(value) >= size:
            divisor = 1e3 if letter == " k" else size
            return f"{value / divisor:g}{letter}"
    return f"{value:,g}"


def _legend(axis: Any, columns: int) -> None:
    axis.legend(
        fontsize=8, ncols=columns, columnspacing=1.2, loc="upper center", bbox_to_anchor=(0.5, -0.17), frameon=False
    )
