"""Pictures of a row of panels, each with lines against a length in tokens, both axes logarithmic."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hf_efficient_attn.pictures import new_figure

PANEL_INCHES = 4.6
LEGEND_INCHES = 2.2
HEIGHT_INCHES = 5.6


@dataclass(frozen=True)
class Line:
    """One line: its points (length, value), and how it is drawn, as matplotlib's `plot` takes it."""

    label: str
    points: list[tuple[int, float]]
    style: dict[str, Any]


@dataclass(frozen=True)
class Panel:
    """One panel: what is drawn, in which unit, and the lines; those without points are left out."""

    title: str
    unit: str
    lines: list[Line]


def draw_panels(heading: str, panels: Sequence[Panel], axis: str, lengths: Sequence[int]) -> Any:
    """Return the figure, its legend that of the first panel."""
    figure = new_figure(PANEL_INCHES * len(panels) + LEGEND_INCHES, HEIGHT_INCHES)
    axes = figure.subplots(1, len(panels))
    for place, panel in zip(axes, panels, strict=True):
        for line in panel.lines:
            if line.points:
                place.plot(*zip(*line.points, strict=True), **line.style, markersize=4, label=line.label)
        place.set(title=panel.title, xlabel=axis, ylabel=panel.unit, yscale="log")
        place.set_xscale("log", base=2)
        place.set_xticks(lengths, [f"{tokens:,}" for tokens in lengths], rotation=40)
        place.minorticks_off()
        place.grid(color="#dddddd", linewidth=0.6)
        place.spines[["top", "right"]].set_visible(False)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    figure.suptitle(heading, fontsize=11)
    return figure
