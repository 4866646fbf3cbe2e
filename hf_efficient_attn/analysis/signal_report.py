"""What `analyze_signal` found, layer by layer: values, a printable table, JSON, and a picture."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from os import PathLike
from statistics import fmean
from typing import Any

from hf_efficient_attn.analysis.plot_signal import PIXELS_PER_INCH, signal_figure
from hf_efficient_attn.pictures import save_figure


@dataclass(frozen=True)
class GainReading:
    """One gain of one block as it is now.

    name, symbol: the config field (`mlp_gain`) and the paper's letter (`β_FF`).
    values: one number, or one per head. initial: where it started, the same for all heads.
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
    gains: those of the block. Entropies and gains are empty for layer 0 and where the model has none.
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

    Entropies describe the softmax matrix A, not the shaped matrix α·I + β·A − γ·C, whose rows are no probabilities.
    """

    model: str
    num_sequences: int
    num_tokens: int  # real ones, over all sequences
    layers: tuple[LayerSignal, ...]

    @property
    def gain_symbols(self) -> tuple[str, ...]:
        """The letters of all gains of the model, in the order of its modules."""
        return tuple(dict.fromkeys(gain.symbol for layer in self.layers for gain in layer.gains))

    @property
    def has_entropy(self) -> bool:
        """Whether the model gave its attention weights."""
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
        """Draw the report; the suffix of `path` says the format (`.png`, `.svg`, …).

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
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        title = f"{self.model}: {self.num_sequences} sequences, {self.num_tokens} tokens; layer 0 is the embedding"
        table = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        return "\n".join([title, *table, *self._trained_line()])

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
