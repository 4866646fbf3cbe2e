"""Bits per byte of models with learned spans at equal time, and the pictures of their curves and of their limits."""

from collections.abc import Sequence
from typing import Any

from hf_efficient_attn.pictures import new_figure

COLORS = {"fixed": "C1", "adaptive": "C0", "dynamic": "C2"}
AXES = {"step": "optimizer step", "train_seconds": "training time (s), without evaluation"}


def add_equal_time(models: dict[str, dict[str, Any]]) -> float:
    """Add each model's bits per byte of the validation text when the fastest had finished; return its seconds."""
    seconds = min(result["train_seconds"] for result in models.values())
    for result in models.values():
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


def draw_limits(models: dict[str, dict[str, Any]]) -> Any:
    """Return a figure of the spans, costs and bits per byte of models by their span limit: figure 3 of the paper."""
    figure = new_figure(11, 3.8)
    shown = {
        "average_span": "average span, ramp included (bytes)",
        "flops_per_token": "multiply-adds a byte",
        "bits_per_byte": "bits per byte, test text",
    }
    for panel, (name, label) in zip(figure.subplots(1, len(shown)), shown.items(), strict=True):
        for kind in dict.fromkeys(result["span"] for result in models.values()):
            curve = [(one["limit"], one[name]) for one in models.values() if one["span"] == kind]
            panel.plot(*zip(*curve, strict=True), color=COLORS[kind], marker="o", markersize=4, label=kind)
        panel.set_xlabel("span limit (bytes)")
        panel.set_ylabel(label)
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter("{x:,.0f}")
        panel.minorticks_off()
        if name != "bits_per_byte":
            panel.set_ylim(bottom=0)
        panel.legend()
    figure.suptitle("Models with fixed and learned spans, by the longest span they may have", fontsize=11)
    return figure


def draw_span_curves(models: dict[str, dict[str, Any]], by: Sequence[str] = ("step", "train_seconds")) -> Any:
    """Return a figure of bits per byte by each of `by`, and of the average span by step."""
    figure = new_figure(3.7 * (len(by) + 1), 3.8)
    *losses, spans = figure.subplots(1, len(by) + 1)
    for result in models.values():
        kind = result["span"]
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
    figure.suptitle(
        f"Attention spans: {', '.join(one['span'] for one in models.values())}; all else is equal", fontsize=11
    )
    return figure
