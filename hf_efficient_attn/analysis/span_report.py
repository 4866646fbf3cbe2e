"""The results of `analyze spans`: values, notes on what they leave out, JSON, a table and a picture.

The picture shows spans by layer, attention by distance, spans along a text, and cost by span limit.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import groupby
from math import ceil, floor, log10
from statistics import fmean, median
from typing import Any

from hf_efficient_attn.messages import aligned
from hf_efficient_attn.models.spans.module import ADAPTIVE, DYNAMIC, FIXED, FROZEN
from hf_efficient_attn.pictures import legend_below, new_figure, plain_number

# a picture shows distances from d to this factor times d as one point
BIN_GROWTH = 2 ** (1 / 8)


@dataclass(frozen=True)
class SpanCost:
    """The spans of one model, and their cost.

    Attributes:
        kind: "fixed", "adaptive", "dynamic", or "frozen" (formerly adaptive).
        span_limit: the longest possible span, in tokens.
        average_span, max_span: in tokens and with the ramp, as the authors report them.
        flops_per_token: multiply-adds of the layers, without embeddings, norms, softmax and the output layer.
    """

    model: str
    kind: str
    span_limit: int
    average_span: float
    max_span: int
    flops_per_token: float


@dataclass(frozen=True)
class LayerSpans:
    """The spans of a layer's heads in tokens, without the ramp, and how many keys on one side get any weight."""

    layer: int
    spans: tuple[float, ...]
    keys: tuple[int, ...]


@dataclass(frozen=True)
class HeadWeights:
    """The attention weights of a head by distance.

    Attributes:
        span, keys: as in `LayerSpans`.
        first_distance: the distance of the first weight, in tokens: 0 if tokens attend to themselves, else 1.
        weights: the average weight that a query gives to each distance; if not causal, both sides are added.
    """

    layer: int
    head: int
    span: float
    keys: int
    first_distance: int
    weights: tuple[float, ...]

    @property
    def total_weight(self) -> float:
        """The weight at all distances shown; the rest, up to 1, lies farther away."""
        return sum(self.weights)

    @property
    def mean_distance(self) -> float:
        """The mean distance of the weight shown, in tokens; 0 if there is none."""
        distances = enumerate(self.weights, self.first_distance)
        return sum(distance * weight for distance, weight in distances) / (self.total_weight or 1.0)

    def points(self) -> list[tuple[float, float]]:
        """Return the points for a logarithmic axis: the mean distance and the mean weight of each bin."""
        return [
            (fmean(bin), fmean(self.weights[distance - self.first_distance] for distance in bin))
            for bin in log_bins(self.first_distance, self.first_distance + len(self.weights) - 1)
        ]


@dataclass(frozen=True)
class TextSpans:
    """The dynamic span of each token of a text, in tokens without the ramp, as the mean over layers and heads."""

    symbols: tuple[str, ...]
    spans: tuple[float, ...]


@dataclass(frozen=True)
class SpanReport:
    """How far the heads of a model attend.

    Attributes:
        ramp: over how many tokens a mask falls from 1 to 0 beyond the span.
        shortest, longest: the heads with the shortest and longest span; among equal spans, the heads with the smallest
            and largest mean distance.
        num_queries: the number of tokens over which their weights are averaged.
        reach: the largest distance at which any head can give weight.
        along_text: None if spans are the same for all tokens.
    """

    cost: SpanCost
    ramp: int
    is_causal: bool
    layers: tuple[LayerSpans, ...]
    shortest: HeadWeights
    longest: HeadWeights
    num_queries: int
    reach: int
    along_text: TextSpans | None

    @property
    def farthest(self) -> int:
        """The largest distance shown."""
        return self.shortest.first_distance + len(self.shortest.weights) - 1

    def notes(self) -> list[str]:
        """Return sentences on what the numbers leave out."""
        found = []
        if self.farthest < self.reach:
            found.append(
                f"Attention weights are shown up to distance {self.farthest:,}, but heads reach up to {self.reach:,}, "
                "because the text is too short. Pass a longer --text or more --tokens."
            )
        if self.along_text is None:
            found.append(
                f"Spans along the text are not shown: this model (span: {self.cost.kind}) has the same spans for every "
                "token."
            )
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return the report in JSON types."""
        data: dict[str, Any] = {**asdict(self), "farthest_shown": self.farthest}
        for name, head in (("shortest", self.shortest), ("longest", self.longest)):
            measures = {"total_weight": head.total_weight, "mean_distance": head.mean_distance}
            data[name] |= {**measures, "points": head.points()}
        return json.loads(json.dumps(data))  # type: ignore[no-any-return]

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "SpanReport":
        """Return the report that `to_dict` wrote; further entries of `data` are ignored."""
        along = data["along_text"]
        found = {
            "cost": SpanCost(**data["cost"]),
            "layers": tuple(_filled(LayerSpans, layer) for layer in data["layers"]),
            "along_text": None if along is None else _filled(TextSpans, along),
            **{name: _filled(HeadWeights, data[name]) for name in ("shortest", "longest")},
        }
        return _filled(cls, {**data, **found})

    def __str__(self) -> str:
        rows = [["layer", "shortest", "median", "mean", "longest"]]
        for layer in self.layers:
            values = (min(layer.keys), median(layer.keys), fmean(layer.keys), max(layer.keys))
            rows.append([str(layer.layer), *(f"{value:,.0f}" for value in values)])
        title = f"{self.cost.model}: keys that heads attend to{'' if self.is_causal else ' on each side'}, in tokens"
        ramp = "" if self.cost.kind == "fixed" else f", including the ramp of {self.ramp:,}"
        heads = [_head_line(name, head) for name, head in (("shortest", self.shortest), ("longest", self.longest))]
        return "\n".join([title + ramp, *aligned(rows), *heads])


def _filled(kind: Any, data: Mapping[str, Any]) -> Any:
    """Return an instance of a dataclass from the entries that are its fields, with lists as tuples."""
    values = {field.name: data[field.name] for field in fields(kind)}
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def log_bins(first: int, last: int) -> list[range]:
    """Return first..last cut into ranges; each is a single distance or ends before `BIN_GROWTH` times its start.

    >>> [(each.start, len(each)) for each in log_bins(15, 24)]
    [(15, 1), (16, 1), (17, 2), (19, 2), (21, 2), (23, 2)]
    """
    bins = []
    while first <= last:
        stop = max(first + 1, round(first * BIN_GROWTH))
        bins.append(range(first, min(stop, last + 1)))
        first = stop
    return bins


def cost_table(costs: list[SpanCost]) -> str:
    """Return a table with a line for each model."""
    rows = [["model", "span", "limit", "average", "longest", "multiply-adds/token"]]
    for cost in costs:
        tokens = (f"{cost.span_limit:,}", f"{cost.average_span:,.1f}", f"{cost.max_span:,}")
        rows.append([cost.model, cost.kind, *tokens, f"{cost.flops_per_token:,.0f}"])
    return "\n".join(aligned(rows))


def _head_line(name: str, head: HeadWeights) -> str:
    return (
        f"{name} span: layer {head.layer}, head {head.head}, {head.span:,.1f} tokens without the ramp, {head.keys:,} "
        f"keys in all; {head.total_weight:.1%} of its weight is shown, at a mean distance of {head.mean_distance:,.1f}"
    )


# Okabe & Ito's palette, which colour-blind readers can distinguish; markers also differ
STYLES = {
    FIXED: {"color": "#D55E00", "marker": "s"},
    ADAPTIVE: {"color": "#0072B2", "marker": "o"},
    DYNAMIC: {"color": "#009E73", "marker": "^"},
    FROZEN: {"color": "#56B4E9", "marker": "D"},
}
LAYER_COLORS = ("#0072B2", "#56B4E9")
SHORTEST, LONGEST = "#E69F00", "#0072B2"
PIXELS_PER_INCH = 130
# how many single characters or longer tokens fit on an axis, and how many letters of a token are shown
AXIS_CHARACTERS, AXIS_TOKENS, LONGEST_LABEL = 110, 60, 14
# smaller weights are not shown, because a logarithmic axis has no 0
SMALLEST_WEIGHT = 1e-6


def spans_figure(report: SpanReport, costs: Sequence[SpanCost], text: str) -> Any:
    """Return the picture of a report.

    Args:
        costs: costs of this model and of those it is compared with; a single cost is not drawn.
        text: name of the text in the picture; dynamic spans are those of this text.

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
        over = "; dynamic: mean over the text" if any(cost.kind == DYNAMIC for cost in costs) else ""
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
    amounts = f"heads attend to {cost.average_span:,.0f} tokens on average, at most {cost.max_span:,}"
    if cost.kind == DYNAMIC:
        return f"{what}\nOver {text}, {amounts}"
    return f"{what}; {amounts}\nAttention weights: mean over {text}"


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
        axis.axhline(ramp, color="#888888", linewidth=1, linestyle=":", label=f"ramp only (span 0), {ramp:,}")
    axis.set_xticks(range(len(report.layers)), [str(layer.layer) for layer in report.layers])
    axis.set_xlabel("layer (heads sorted by span)")
    axis.set_ylabel("keys a head attends to" + ("" if report.is_causal else " on each side"))
    what = {FIXED: "", DYNAMIC: " (mean span over the text, ramp included)"}.get(report.cost.kind, " (ramp included)")
    axis.set_title(f"How far does each head attend?{what}", fontsize=10)
    legend_below(axis, columns=2)


def _draw_weights(axis: Any, report: SpanReport) -> None:
    """Draw the weights of two heads, without those below `SMALLEST_WEIGHT`."""
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
    axis.set_title(f"Attention weights of two heads (mean over {report.num_queries:,} tokens)", fontsize=10)
    legend_below(axis, columns=1 if mean else 2)


def _draw_text(axis: Any, text: TextSpans) -> None:
    """Draw the spans of the last tokens, which have the most text before them."""
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
    axis.set_title("Where does the model use more context? (mean over layers and heads, without the ramp)", fontsize=10)


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
    legend_below(axis, columns=4)


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
    """Return a number with the prefix k, M or G, as a formatter of tick labels.

    >>> _engineering(41_600_000.0), _engineering(250.0), _engineering(0.0)
    ('41.6 M', '250', '0')
    """
    for size, letter in ((1e9, " G"), (1e6, " M"), (1e4, " k")):
        if abs(value) >= size:
            divisor = 1e3 if letter == " k" else size
            return f"{value / divisor:g}{letter}"
    return f"{value:,g}"
