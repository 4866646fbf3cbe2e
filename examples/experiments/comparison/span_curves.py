"""Bits per byte of the kinds of span at equal time, and the picture of their curves."""

from collections.abc import Sequence
from typing import Any

from hf_efficient_attn.pictures import new_figure

COLORS = {"fixed": "C1", "adaptive": "C0", "dynamic": "C2"}
AXES = {"step": "optimizer step", "train_seconds": "training time (s), without evaluation"}


def add_equal_time(kinds: dict[str, dict[str, Any]]) -> float:
    """Note for each kind the bits per byte of the validation text when the fastest had finished; return its seconds."""
    seconds = min(result["train_seconds"] for result in kinds.values())
    for result in kinds.values():
        curve = points(result["history"], "train_seconds", "eval_bits_per_byte")
        result["bits_per_byte_at_equal_time"] = interpolate(curve, seconds)
    return seconds


def points(history: Sequence[dict[str, float]], x: str, y: str) -> list[tuple[float, float]]:
    """Return the entries that have both values."""
    return [(entry[x], entry[y]) for entry in history if x in entry and y in entry]


def interpolate(curve: Sequence[tuple[float, float]], x: float) -> float | None:
    """Return the value of a curve at x, on the straight line between two points; None before the first.

    >>> interpolate([(1.0, 5.0), (3.0, 4.0), (4.0, 4.0)], 1.5), interpolate([(1.0, 5.0)], 0.5)
    (4.75, None)
    """
    if not curve or x < curve[0][0]:
        return None
    for (left, before), (right, after) in zip(curve, curve[1:], strict=False):
        if left <= x <= right:
            return before + (after - before) * (x - left) / (right - left)
    return curve[-1][1]


def draw_span_curves(kinds: dict[str, dict[str, Any]], by: Sequence[str] = ("step", "train_seconds")) -> Any:
    """Return a figure of bits per byte by each of `by`, and of the average span by step."""
    figure = new_figure(3.7 * (len(by) + 1), 3.8)
    *losses, spans = figure.subplots(1, len(by) + 1)
    for kind, result in kinds.items():
        for panel, x in zip(losses, by, strict=True):
            curve = points(result["history"], x, "eval_bits_per_byte")
            panel.plot(*zip(*curve, strict=True), color=COLORS[kind], marker="o", markersize=4, label=kind)
        training = [entry for entry in result["history"] if "loss" in entry]
        curve = points(training, "step", "average_span")
        spans.plot(*zip(*curve, strict=True), color=COLORS[kind], label=kind)
    for panel, x in zip((*losses, spans), (*by, "step"), strict=True):
        panel.set_xlabel(AXES[x])
        panel.set_xlim(left=0)
        panel.grid(alpha=0.3)
        panel.legend()
    for panel in losses:
        panel.set_ylabel("bits per byte, validation text")
    spans.set_ylabel("average span, ramp included (bytes)")
    spans.set_yscale("log", base=2)
    spans.yaxis.set_major_formatter("{x:,.0f}")
    spans.minorticks_off()
    figure.suptitle(f"Attention spans: {', '.join(kinds)}; all else is equal", fontsize=11)
    return figure
