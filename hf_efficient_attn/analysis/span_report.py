"""What `analyze spans` found: the values, notes on what they leave out, and their forms as JSON and as a table."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from statistics import fmean, median
from typing import Any

# distances that a picture shows as one point grow by this factor
BIN_GROWTH = 2 ** (1 / 8)


@dataclass(frozen=True)
class SpanCost:
    """What the spans of one model cost.

    Attributes:
        kind: "fixed", "adaptive", "dynamic", or "frozen", which were adaptive once.
        span_limit: the longest span there can be, in tokens.
        average_span, max_span: as the authors report them, in tokens, with the ramp.
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
    """Where a head looks.

    Attributes:
        span, keys: as in `LayerSpans`.
        first_distance: the distance of the first weight, in tokens: 0 if tokens read themselves, else 1.
        weights: the weight a query gives to each distance, on average; both sides together where both are read.
    """

    layer: int
    head: int
    span: float
    keys: int
    first_distance: int
    weights: tuple[float, ...]

    @property
    def total_weight(self) -> float:
        """The weight at all distances shown; what is missing from 1 lies farther away."""
        return sum(self.weights)

    @property
    def mean_distance(self) -> float:
        """The mean distance of the weight shown, in tokens; 0 where there is none."""
        distances = enumerate(self.weights, self.first_distance)
        return sum(distance * weight for distance, weight in distances) / (self.total_weight or 1.0)

    def points(self) -> list[tuple[float, float]]:
        """Return what a picture with a logarithmic axis shows: the mean distance and the mean weight of each bin."""
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
    """How far the heads of a model look.

    Attributes:
        ramp: over how many tokens a mask falls from 1 to 0 beyond the span.
        shortest, longest: the heads with the shortest and longest span; among equal ones, those that look nearest and
            farthest on average.
        num_queries: over how many tokens their weights are averaged.
        reach: the largest distance at which any head gives weight.
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
        """Return what the numbers leave out, in sentences."""
        found = []
        if self.farthest < self.reach:
            found.append(
                f"Attention weights are shown up to distance {self.farthest:,}, but heads reach up to {self.reach:,}: "
                "the text is too short for more. Pass a longer --text or more --tokens."
            )
        if self.along_text is None:
            found.append(
                f"No spans along the text: those of this model (span: {self.cost.kind}) are the same for every token."
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
        """Return the report that `to_dict` wrote, whatever stands beside it."""
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
        title = f"{self.cost.model}: keys that heads read{'' if self.is_causal else ' on each side'}, in tokens"
        ramp = "" if self.cost.kind == "fixed" else f", ramp of {self.ramp:,} included"
        heads = [_head_line(name, head) for name, head in (("shortest", self.shortest), ("longest", self.longest))]
        return "\n".join([title + ramp, *aligned(rows), *heads])


def _filled(kind: Any, data: Mapping[str, Any]) -> Any:
    """Return a dataclass from the entries that are its fields, its lists as tuples."""
    values = {field.name: data[field.name] for field in fields(kind)}
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def log_bins(first: int, last: int) -> list[range]:
    """Return first..last cut into ranges, each of a single distance or ending before `BIN_GROWTH` times its start.

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
    """Return a line for each model."""
    rows = [["model", "span", "limit", "average", "longest", "multiply-adds/token"]]
    for cost in costs:
        tokens = (f"{cost.span_limit:,}", f"{cost.average_span:,.1f}", f"{cost.max_span:,}")
        rows.append([cost.model, cost.kind, *tokens, f"{cost.flops_per_token:,.0f}"])
    return "\n".join(aligned(rows))


def aligned(rows: list[list[str]]) -> list[str]:
    """Return the rows as lines, in columns that are flush right.

    >>> aligned([["layer", "keys"], ["0", "1,024"]])
    ['layer   keys', '    0  1,024']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _head_line(name: str, head: HeadWeights) -> str:
    return (
        f"{name} span: layer {head.layer}, head {head.head}, {head.span:,.1f} tokens before the ramp, {head.keys:,} "
        f"keys in all; {head.total_weight:.1%} of its weight is shown, at a mean distance of {head.mean_distance:,.1f}"
    )
