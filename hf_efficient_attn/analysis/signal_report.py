"""The results of `analyze_signal`, layer by layer: values, a printable table, JSON, and a picture.

The picture shows token cosine and RMS norm by layer for any number of models, and gains and entropy for a single model.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from statistics import fmean
from typing import Any

from hf_efficient_attn.messages import aligned
from hf_efficient_attn.pictures import legend_below, new_figure, save_figure


@dataclass(frozen=True)
class GainReading:
    """The current value of one gain of one block.

    name, symbol: the config field (`mlp_gain`) and the paper's letter (`β_FF`).
    values: one number, or one per head. initial: the value at the start, the same for all heads.
    is_trained: whether it is a parameter; otherwise it is a constant of the architecture.
    """

    name: str
    symbol: str
    values: tuple[float, ...]
    initial: float
    is_trained: bool


@dataclass(frozen=True)
class LayerSignal:
    """The hidden states after one block (after the embedding for layer 0), and the block that made them.

    token_cosine: mean cosine between two different real tokens of a sequence, in [-1, 1]; 1 is rank collapse.
    rms: root mean square of the numbers in the hidden states of real tokens.
    entropy_nats: mean entropy of a real query's softmax weights A (before shaping), per head, in nats.
    uniform_nats: the entropy that uniform attention over the allowed keys would have, in nats.
    entropy_relative: entropy_nats divided by uniform_nats, per head, in [0, 1].
    gains: the gains of the block. Entropies and gains are empty for layer 0, and if the model has none.
    """

    token_cosine: float
    rms: float
    entropy_nats: tuple[float, ...] = ()
    entropy_relative: tuple[float, ...] = ()
    uniform_nats: float | None = None
    gains: tuple[GainReading, ...] = ()


@dataclass(frozen=True)
class SignalReport:
    """How a signal passes through one model: `layers[0]` is the embedding, `layers[i]` the output of block i.

    Entropies describe the softmax matrix A, not the shaped matrix α·I + β·A − γ·C, whose rows are not probabilities.
    """

    model: str
    num_sequences: int
    num_tokens: int  # real tokens, in all sequences together
    layers: tuple[LayerSignal, ...]

    @property
    def gain_symbols(self) -> tuple[str, ...]:
        """The letters of all gains of the model, in the order of its modules."""
        return tuple(dict.fromkeys(gain.symbol for layer in self.layers for gain in layer.gains))

    @property
    def has_entropy(self) -> bool:
        """Whether the model returned its attention weights."""
        return any(layer.entropy_nats for layer in self.layers)

    def to_dict(self) -> dict[str, Any]:
        """Return the report in JSON types; each layer also carries its number as `layer`."""
        data = json.loads(json.dumps(asdict(self)))
        data["layers"] = [{"layer": number, **layer} for number, layer in enumerate(data["layers"])]
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "SignalReport":
        """Return the report that `to_dict` wrote."""
        return cls(**{**data, "layers": tuple(map(_layer_from_dict, data["layers"]))})

    def plot(self, path: str | PathLike[str]) -> None:
        """Draw the report; the suffix of `path` sets the format (`.png`, `.svg`, …).

        Raises:
            ImportError: matplotlib is not installed.
        """
        save_figure(signal_figure([self]), path, PIXELS_PER_INCH)

    def __str__(self) -> str:
        symbols = self.gain_symbols
        header = ["layer", "token cosine", "rms"]
        header += ["entropy A (nats)", "of uniform"] if self.has_entropy else []
        rows = [header + list(symbols)]
        for number, layer in enumerate(self.layers):
            row = [str(number), f"{layer.token_cosine:.3f}", f"{layer.rms:.3g}"]
            if self.has_entropy:
                row += [_mean(layer.entropy_nats, ".2f"), _mean(layer.entropy_relative, ".0%")]
            values = {gain.symbol: gain.values for gain in layer.gains}
            rows.append(row + [_mean(values.get(symbol, ()), ".3f") for symbol in symbols])
        title = f"{self.model}: {self.num_sequences} sequences, {self.num_tokens} tokens; layer 0 is the embedding"
        return "\n".join([title, *aligned(rows), *self._trained_line()])

    def _trained_line(self) -> list[str]:
        trained = {gain.symbol for layer in self.layers for gain in layer.gains if gain.is_trained}
        if not self.gain_symbols:
            return []
        constant = [symbol for symbol in self.gain_symbols if symbol not in trained]
        shown = [symbol for symbol in self.gain_symbols if symbol in trained]
        return [f"trained: {', '.join(shown) or 'none'}; constant: {', '.join(constant) or 'none'} (means over heads)"]


def _layer_from_dict(data: Mapping[str, Any]) -> LayerSignal:
    fields = {name: value for name, value in data.items() if name != "layer"}
    fields |= {name: tuple(data[name]) for name in ("entropy_nats", "entropy_relative")}
    gains = [GainReading(**{**gain, "values": tuple(gain["values"])}) for gain in data["gains"]]
    return LayerSignal(**{**fields, "gains": tuple(gains)})


def _mean(values: tuple[float, ...], form: str) -> str:
    return format(fmean(values), form) if values else "-"


# Okabe & Ito's palette, which colour-blind readers can distinguish, without its yellow; markers also differ
COLORS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#777777")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "h", "*")
PIXELS_PER_INCH = 130


def signal_figure(reports: "Sequence[SignalReport]") -> Any:
    """Return the picture of `reports`.

    It has a panel for the token cosine and one for the RMS norm, with a line for each report. For a single report, it
    also has panels for the attention entropy and the gains, if the model has them.

    Raises:
        ImportError: matplotlib is not installed.
    """
    panels: list[Any] = [_draw_cosine, _draw_rms]
    if len(reports) == 1:
        panels += [_draw_entropy] if reports[0].has_entropy else []
        panels += [_draw_gains] if reports[0].gain_symbols else []
    columns = min(len(panels), 2) if len(panels) != 3 else 3
    num_rows = -(-len(panels) // columns)
    figure = new_figure(4.4 * columns, 3.3 * num_rows + 0.25 * (1 + len(reports) // 2))
    axes = figure.subplots(num_rows, columns, squeeze=False).flat
    for draw, axis in zip(panels, axes, strict=True):
        draw(axis, reports)
        _finish_axis(axis, num_layers=max(len(report.layers) for report in reports))
    if len(reports) == 1:
        figure.suptitle(reports[0].model)
    else:
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2 if len(labels) > 3 else 1, frameon=False)
    return figure


def _style(index: int, num_lines: int) -> dict[str, Any]:
    """Return the style of line `index`; earlier lines are thicker, with larger hollow markers, so that all show."""
    below = num_lines - 1 - index
    return {
        "color": COLORS[index % len(COLORS)],
        "marker": MARKERS[index % len(MARKERS)],
        "markerfacecolor": "none",
        "markersize": 4.5 + 0.8 * below,
        "linewidth": 1.5 + 0.3 * below,
    }


def _finish_axis(axis: Any, num_layers: int) -> None:
    step = max(1, -(-num_layers // 13))
    axis.set_xticks(range(0, num_layers, step))
    axis.set_xlim(-0.5, num_layers - 0.5)
    axis.set_xlabel("block (0 = embedding)")
    axis.grid(color="#DDDDDD", linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)


def _draw_cosine(axis: Any, reports: "Sequence[SignalReport]") -> None:
    for index, report in enumerate(reports):
        cosines = [layer.token_cosine for layer in report.layers]
        axis.plot(range(len(cosines)), cosines, label=report.model, **_style(index, len(reports)))
    axis.axhline(1.0, color="#888888", linewidth=0.8)
    lowest = min(_finite(layer.token_cosine for report in reports for layer in report.layers))
    axis.set_ylim(min(-0.05, lowest - 0.05), 1.08)
    axis.set_title("Do tokens stay apart? (1 = rank collapse)", fontsize=10)
    axis.set_ylabel("mean cosine between tokens")


def _draw_rms(axis: Any, reports: "Sequence[SignalReport]") -> None:
    for index, report in enumerate(reports):
        axis.plot(range(len(report.layers)), [layer.rms for layer in report.layers], **_style(index, len(reports)))
    sizes = _finite(layer.rms for report in reports for layer in report.layers)
    axis.set_yscale("log", subs=[3])
    axis.set_ylim(min(sizes) / 2, max(sizes) * 2)  # wide enough for a tick at 1 or 3 of some decade
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter("{x:g}")
    axis.set_title("Does the signal keep its size?", fontsize=10)
    axis.set_ylabel("RMS of hidden states (log)")


def _draw_entropy(axis: Any, reports: "Sequence[SignalReport]") -> None:
    report = reports[0]
    for number, layer in enumerate(report.layers):
        axis.plot([number] * len(layer.entropy_nats), layer.entropy_nats, "o", color="#56B4E9", markersize=3.5)
    measured = [(number, layer) for number, layer in enumerate(report.layers) if layer.entropy_nats]
    numbers = [number for number, _ in measured]
    axis.plot([], [], "o", color="#56B4E9", markersize=3.5, label="one head")
    axis.plot(numbers, [fmean(layer.entropy_nats) for _, layer in measured], color="#0072B2", label="mean of heads")
    uniform = [layer.uniform_nats or 0.0 for _, layer in measured]
    axis.plot(numbers, uniform, "--", color="#000000", linewidth=1.2, label="uniform over allowed keys")
    axis.set_ylim(0, max(_finite(uniform)) * 1.12 + 0.05)
    axis.set_title("How widely is attention spread?", fontsize=10)
    axis.set_ylabel("entropy of softmax A (nats)")
    legend_below(axis, columns=3)


def _draw_gains(axis: Any, reports: "Sequence[SignalReport]") -> None:
    layers, symbols = reports[0].layers, reports[0].gain_symbols
    for index, symbol in enumerate(symbols):
        found = [(number, gain) for number, layer in enumerate(layers) for gain in layer.gains if gain.symbol == symbol]
        numbers = [number for number, _ in found]
        means = [fmean(gain.values) for _, gain in found]
        is_trained = any(gain.is_trained for _, gain in found)
        style = _style(index, len(symbols))
        axis.plot(numbers, means, "-" if is_trained else ":", label=_as_math(symbol), **style)
        low, high = [min(gain.values) for _, gain in found], [max(gain.values) for _, gain in found]
        if low != high:
            axis.fill_between(numbers, low, high, color=style["color"], alpha=0.2, linewidth=0)
    axis.set_title("Gains (band: range over heads; dotted: not trained)", fontsize=10)
    axis.set_ylabel("gain")
    axis.margins(y=0.12)
    legend_below(axis, columns=5)


def _finite(values: Iterable[float]) -> list[float]:
    """Return the finite values, or [1.0] if a diverged model left none."""
    return [value for value in values if math.isfinite(value)] or [1.0]


def _as_math(symbol: str) -> str:
    letter, _, index = symbol.partition("_")
    return rf"${letter}_{{\mathrm{{{index}}}}}$" if index else f"${letter}$"
