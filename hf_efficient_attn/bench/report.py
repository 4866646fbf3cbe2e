"""Publish results: a description of the machine, JSON, Markdown tables, and pictures of panels."""

import argparse
import datetime
import json
import math
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

import torch
import transformers

from hf_efficient_attn.errors import EfficientAttentionError, InputError
from hf_efficient_attn.pictures import can_draw, new_figure, plain_number

DEVICES = ("auto", "cpu", "cuda")
MEBIBYTE = 2**20
# a table cell without a value
NONE = "–"

Row = dict[str, Any]
# colours of lines, in this order, if a benchmark sets none
PALETTE = ("#4477aa", "#ee8866", "#44bb99", "#aa3377", "#bbaa44", "#66ccee", "#228833", "#ee6677", "#882255", "#999999")
WIDTH_INCHES = 11.0
TITLE_LETTERS = 30
HEIGHT_INCHES = 3.6
LEGEND_INCHES = 0.9
MOST_COLUMNS = 3
# sizes of the markers of the first and the last line, in points: if they lie on each other, both can be seen
MARKER_SIZES = (9.0, 3.5)
# (most decades of an axis, the numbers that are labelled in each decade)
LABELLED = (
    (0.4, (1, 1.2, 1.4, 1.6, 1.8, 2, 2.2, 2.5, 3, 3.5, 4, 5, 6, 7, 8)),
    (1.0, (1, 1.5, 2, 3, 4, 5, 7)),
    (3.5, (1, 2, 5)),
    (math.inf, (1,)),
)


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Return what a timing depends on, in JSON types: processor, threads, versions, GPU, date."""
    return {
        "device": device.type,
        "cpu": cpu_model(),
        "cpu_cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def cpu_model() -> str:
    """Return the name of the processor as the system reports it."""
    listing = Path("/proc/cpuinfo")
    if listing.exists():
        for line in listing.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def machine_line(machine: dict[str, Any]) -> str:
    """Return the description of `describe_machine` as one line."""
    where = machine["gpu"] or f"{machine['cpu']}, {machine['torch_threads']} of {machine['cpu_cores']} cores"
    versions = f"torch {machine['torch']}, transformers {machine['transformers']}"
    return f"{where}; {versions}; {machine['date'][:10]}"


def clock_line(settings: dict[str, Any]) -> str:
    """Return a sentence if the clock counted processor time, else an empty text; see `counts_processor_time`."""
    return "Seconds are of processor time, on one thread. " if settings.get("processor_time") else ""


def resolve_device(name: str) -> torch.device:
    """Return the device called `name`, one of `DEVICES`; `auto` is CUDA if torch sees a CUDA device.

    Raises:
        EfficientAttentionError: CUDA is requested, but torch sees no CUDA device.
    """
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise EfficientAttentionError(
            f"device='cuda', but torch {torch.__version__} sees no CUDA device. Use 'cpu' or 'auto'."
        )
    return torch.device("cuda" if has_cuda and name == "auto" else "cpu" if name == "auto" else name)


def check_at_least_one(**counts: int) -> None:
    """Raise InputError if one of the named counts is below 1."""
    for name, count in counts.items():
        if count < 1:
            raise InputError(f"{name}={count} must be at least 1.")


def one_line(error: Exception) -> str:
    """Return the first line of an error, with the name of its class unless it is an error of this package."""
    text = (str(error).strip() or "no message").splitlines()[0]
    return text if isinstance(error, EfficientAttentionError) else f"{type(error).__name__}: {text}"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table: first column left-aligned, the others right-aligned, padded to be readable as text.

    >>> print(markdown_table(["block", "speed"], [["sas", "1.2"]]))
    | block | speed |
    |:------|------:|
    | sas   |   1.2 |
    """
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = [_line(header, widths)]
    lines.append("|".join(["", f":{'-' * (widths[0] + 1)}", *(f"{'-' * (width + 1)}:" for width in widths[1:]), ""]))
    return "\n".join(lines + [_line(row, widths) for row in rows])


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [
        cells[0].ljust(widths[0]),
        *(cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)),
    ]
    return f"| {' | '.join(padded)} |"


def publish(
    args: argparse.Namespace,
    name: str,
    results: dict[str, Any],
    markdown: str,
    draw: Callable[[dict[str, Any]], Any] | None = None,
) -> None:
    """Print the tables, or JSON, write NAME.json, NAME.md and NAME.png into the folder, and say where.

    Without matplotlib there is no picture, and a line says so; the other results are written.

    Args:
        args: arguments with the options of `add_results`.
        draw: returns the picture of the results; None: there is no picture.
    """
    written, stream = json_text(without_samples(results)), sys.stderr if args.json else sys.stdout
    print(written if args.json else markdown)
    paths = [args.output / f"{name}.{suffix}" for suffix in ("json", "md")]
    paths[0].write_text(written + "\n", encoding="utf-8")
    paths[1].write_text(markdown + "\n", encoding="utf-8")
    if draw is not None and can_draw():
        paths.append(args.output / f"{name}.png")
        draw(results).savefig(paths[2], dpi=160)
    elif draw is not None:
        print("\nNo picture: matplotlib is not installed. Run: pip install matplotlib", file=stream)
    print("\nWritten: " + ", ".join(str(path) for path in paths), file=stream)


def without_samples(value: Any) -> Any:
    """Return results without the "samples" of their rounds: medians and quartiles stay."""
    if isinstance(value, dict):
        return {name: without_samples(entry) for name, entry in value.items() if name != "samples"}
    return [without_samples(entry) for entry in value] if isinstance(value, list) else value


def json_text(results: dict[str, Any]) -> str:
    """Return results as JSON with a line for each entry, and for each record of a list.

    >>> print(json_text({"settings": {"repeats": 2}, "results": [{"tokens": 8}, {"tokens": 16}]}))
    {
    "settings": {"repeats": 2},
    "results": [
     {"tokens": 8},
     {"tokens": 16}
    ]
    }
    """
    entries = []
    for name, value in results.items():
        text = json.dumps(value)
        if isinstance(value, list) and value and isinstance(value[0], dict):
            text = "[\n" + ",\n".join(f" {json.dumps(record)}" for record in value) + "\n]"
        entries.append(f"{json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(entries) + "\n}"


def curve(rows: list[Row], measure: str) -> list[tuple[int, float]]:
    """Return (tokens, median milliseconds) of the timed rows, by length."""
    points = [
        (row["tokens"], row[measure]["milliseconds"]["median"])
        for row in rows
        if "milliseconds" in row.get(measure, {})
    ]
    return sorted(points)


def growth(points: list[tuple[int, float]]) -> float | None:
    """Return the factor of time per doubling of the length, between the last two points; None: fewer than two points.

    >>> growth([(128, 1.0), (1024, 2.0), (4096, 8.0)])
    2.0
    """
    if len(points) < 2:
        return None
    (short, small), (long, large) = points[-2:]
    return (large / small) ** (1 / math.log2(long / short))


def crossover(dense: list[tuple[int, float]], points: list[tuple[int, float]]) -> tuple[float, float] | None:
    """Return the point (tokens, milliseconds) from which on a curve stays below dense attention; None: there is none.

    Between two lengths the point is interpolated on logarithmic axes.

    >>> crossover([(100, 1.0), (400, 16.0)], [(100, 4.0), (400, 4.0)])
    (200.0, 4.0)
    """
    known = dict(dense)
    shared = [(tokens, time, known[tokens]) for tokens, time in points if tokens in known]
    last_slower = max((index for index, (_, time, other) in enumerate(shared) if time > other), default=-1)
    if last_slower == len(shared) - 1:
        return None
    tokens, time, other = shared[last_slower + 1]
    if last_slower == -1:
        return float(tokens), time
    before, time_before, other_before = shared[last_slower]
    above, below = math.log(time_before / other_before), math.log(other / time)
    part = above / (above + below)
    return before * (tokens / before) ** part, time_before * (time / time_before) ** part


@dataclass(frozen=True)
class Line:
    """One line: its points (length, value), and its style as arguments of matplotlib's `plot`."""

    label: str
    points: list[tuple[int, float]]
    style: dict[str, Any]


@dataclass(frozen=True)
class Panel:
    """One panel: its title, unit and lines; lines without points are left out.

    If every line has a single point, all at the same length, the lines are drawn as bars.
    """

    title: str
    unit: str
    lines: list[Line]


def draw_panels(heading: str, panels: Sequence[Panel], axis: str, lengths: Sequence[int]) -> Any:
    """Return a figure of panels with one legend for all their lines."""
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
    # handles long enough to tell dashed lines from solid ones
    style = {"loc": "outside lower center", "ncols": 4, "fontsize": 9, "handlelength": 4, "numpoints": 2}
    handles: dict[str, Any] = {}
    for place in axes:
        for handle, label in zip(*place.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if handles:
        figure.legend(handles.values(), handles.keys(), **style)
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
        value = line.points[0][1]
        place.annotate(
            f" {value:,.0f}" if value >= 100 else f" {value:.3g}", (line.points[0][1], number), va="center", fontsize=8
        )
    place.set_title(fill(f"{panel.title} ({axis}: {lines[0].points[0][0]:,})", TITLE_LETTERS), fontsize=10)
    place.set_xlabel(panel.unit)
    place.xaxis.set_major_formatter(plain_number)
    place.set_yticks(range(len(lines)), [line.label for line in lines], fontsize=8)
    place.invert_yaxis()
    place.margins(x=0.2)


def label_decades(place: Any) -> None:
    """Label a logarithmic y axis with plain numbers; the fewer decades it has, the more numbers per decade."""
    from matplotlib.ticker import LogLocator, NullLocator

    lowest, highest = place.get_ylim()
    decades = math.log10(highest / lowest)
    labelled = next(numbers for most, numbers in LABELLED if decades <= most)
    place.yaxis.set_major_locator(LogLocator(subs=labelled, numticks=24))
    place.yaxis.set_major_formatter(plain_number)
    place.yaxis.set_minor_locator(NullLocator())
