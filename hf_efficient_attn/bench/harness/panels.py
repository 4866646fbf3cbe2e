"""Pictures of panels, each with points against a length in tokens, both axes logarithmic; or with bars."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import Any

from hf_efficient_attn.pictures import new_figure, plain_number

WIDTH_INCHES = 11.0
TITLE_LETTERS = 30
HEIGHT_INCHES = 3.6
LEGEND_INCHES = 0.9
MOST_COLUMNS = 3
# of the first line's markers and the last one's, in points: where both are equal, one shows within the other
MARKER_SIZES = (9.0, 3.5)
# what is labelled in each decade of an axis of at most so many decades
LABELLED = (
    (0.4, (1, 1.2, 1.4, 1.6, 1.8, 2, 2.2, 2.5, 3, 3.5, 4, 5, 6, 7, 8)),
    (1.0, (1, 1.5, 2, 3, 4, 5, 7)),
    (3.5, (1, 2, 5)),
    (math.inf, (1,)),
)


@dataclass(frozen=True)
class Line:
    """One line: its points (length, value), and how it is drawn, as matplotlib's `plot` takes it."""

    label: str
    points: list[tuple[int, float]]
    style: dict[str, Any]


@dataclass(frozen=True)
class Panel:
    """One panel: what is drawn, in which unit, and the lines; those without points are left out.

    Where all have one point, at the same length, they are drawn as bars.
    """

    title: str
    unit: str
    lines: list[Line]


def draw_panels(heading: str, panels: Sequence[Panel], axis: str, lengths: Sequence[int]) -> Any:
    """Return the figure, its legend that of the first panel."""
    num_rows = -(-len(panels) // MOST_COLUMNS)
    num_columns = -(-len(panels) // num_rows)
    figure = new_figure(WIDTH_INCHES, HEIGHT_INCHES * num_rows + LEGEND_INCHES)
    axes = figure.subplots(num_rows, num_columns, squeeze=False).flatten()[: len(panels)]
    for place, panel in zip(axes, panels, strict=True):
        lines = [line for line in panel.lines if line.points]
        if len({line.points[0][0] for line in lines}) == 1 and all(len(line.points) == 1 for line in lines):
            _draw_bars(place, panel, lines, axis)
        else:
            _draw_lines(place, panel, lines, axis, lengths)
        place.grid(color="#dddddd", linewidth=0.6)
        place.set_axisbelow(True)
        place.spines[["top", "right"]].set_visible(False)
    # long enough to tell dashes from a line
    style = {"loc": "outside lower center", "ncols": 4, "fontsize": 9, "handlelength": 4, "numpoints": 2}
    figure.legend(*axes[0].get_legend_handles_labels(), **style)
    figure.suptitle(heading, fontsize=10)
    return figure


def _draw_lines(place: Any, panel: Panel, lines: Sequence[Line], axis: str, lengths: Sequence[int]) -> None:
    largest, smallest = MARKER_SIZES
    for number, line in enumerate(lines):
        size = largest + (smallest - largest) * number / max(len(lines) - 1, 1)
        style = {**line.style, "linewidth": 1.0, "markersize": size, "markerfacecolor": "none", "label": line.label}
        place.plot(*zip(*line.points, strict=True), **style)
    place.set(xlabel=axis, ylabel=panel.unit, yscale="log")
    place.set_title(fill(panel.title, TITLE_LETTERS), fontsize=10)
    place.set_xscale("log", base=2)
    place.set_xticks(lengths, [f"{tokens:,}" for tokens in lengths], rotation=40)
    place.minorticks_off()
    label_decades(place)


def _draw_bars(place: Any, panel: Panel, lines: Sequence[Line], axis: str) -> None:
    for number, line in enumerate(lines):
        is_dashed = line.style.get("linestyle", "-") != "-"
        style = {"facecolor": "white" if is_dashed else line.style["color"], "edgecolor": line.style["color"]}
        place.barh(number, line.points[0][1], hatch="//" if is_dashed else None, **style)
        place.annotate(f" {line.points[0][1]:,.0f}", (line.points[0][1], number), va="center", fontsize=8)
    place.set_title(fill(f"{panel.title} ({axis}: {lines[0].points[0][0]:,})", TITLE_LETTERS), fontsize=10)
    place.set_xlabel(panel.unit)
    place.xaxis.set_major_formatter(plain_number)
    place.set_yticks(range(len(lines)), [line.label for line in lines], fontsize=8)
    place.invert_yaxis()
    place.margins(x=0.2)


def label_decades(place: Any) -> None:
    """Label a logarithmic y axis in plain numbers, more of them in a decade the fewer decades there are."""
    from matplotlib.ticker import LogLocator, NullLocator

    lowest, highest = place.get_ylim()
    decades = math.log10(highest / lowest)
    labelled = next(numbers for most, numbers in LABELLED if decades <= most)
    place.yaxis.set_major_locator(LogLocator(subs=labelled, numticks=24))
    place.yaxis.set_major_formatter(plain_number)
    place.yaxis.set_minor_locator(NullLocator())
