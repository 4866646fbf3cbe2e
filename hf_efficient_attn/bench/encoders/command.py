"""Benchmarks of whole encoders: one of ours, and others of equal width and depth, at several lengths."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hf_efficient_attn.bench.encoders.cases import LSTM, Shape, build_encoder, build_training_step, training_step
from hf_efficient_attn.bench.encoders.report import add_ratios, results_figure, results_markdown
from hf_efficient_attn.bench.harness.options import (
    add_counts,
    add_results,
    add_step_options,
    check_counts,
    device_settings,
    fill_options,
    leave_open,
    make_folder,
    set_threads,
)
from hf_efficient_attn.bench.harness.report import describe_machine, publish, resolve_device
from hf_efficient_attn.bench.harness.steps import Contestants
from hf_efficient_attn.errors import InputError


@dataclass(frozen=True)
class EncoderBenchmark:
    """A command of `bench`, as its module offers it.

    Attributes:
        name: of the command and its files.
        encoders: what is compared, of `cases`.
        lengths: in tokens, of which the first two are measured with `--quick`.
        sizes: {name: (default, help)}; fields of `Shape`.
    """

    name: str
    encoders: tuple[str, ...]
    lengths: tuple[int, ...]
    sizes: Mapping[str, tuple[int, str]]

    @property
    def counts(self) -> dict[str, tuple[int, str]]:
        """The sizes, and the number of rounds."""
        text = "timed rounds, as far as there is time; a round runs every encoder once"
        return {**self.sizes, "repeats": (10, text)}

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the options of the command."""
        spread = f"{min(self.lengths)} to {max(self.lengths)}"
        texts = {
            "lengths": ("+", list(self.lengths), f"lengths in tokens (default {spread})"),
            "memory_lengths": ("*", None, "which of the lengths peak memory is measured at (default: all)"),
        }
        for name, (how, default, text) in texts.items():
            flag = f"--{name.replace('_', '-')}"
            parser.add_argument(flag, nargs=how, type=int, default=default, metavar="N", help=text)
        parser.add_argument(
            "--encoders",
            nargs="+",
            choices=self.encoders,
            default=list(self.encoders),
            help="encoders to compare (default all)",
        )
        add_counts(parser, self.counts)
        add_step_options(parser, "all encoders", max_seconds=30)
        parser.add_argument("--quick", action="store_true", help="unless said otherwise, two lengths and two rounds")
        add_results(parser, f"outputs/bench_{self.name}")
        leave_open(parser, "lengths", "repeats")

    def main(self, args: argparse.Namespace) -> None:
        """Measure, print the tables, and write JSON, Markdown and a picture into `args.output`.

        Raises:
            EfficientAttentionError: a count below 1, a width that cannot be divided, patches that are no square, or
                CUDA without a device.
        """
        fill_options(args, {"lengths": list(self.lengths[:2]), "repeats": 2})
        check_counts(args, self.counts, "lengths", *(["memory_lengths"] if args.memory_lengths else []))
        directions = 2 if LSTM in self.encoders else 1
        if args.hidden_size % (directions * args.heads):
            needed = f"2 · heads={2 * args.heads}: heads divide it, and the directions of the LSTM."
            needed = needed if directions == 2 else f"heads={args.heads}."
            raise InputError(f"hidden_size={args.hidden_size} must be a multiple of {needed}")
        set_threads(args)
        device = resolve_device(args.device)
        settings = self.settings_of(args, device)
        for tokens in settings["lengths"]:
            self.shape_of(tokens, settings, device)
        make_folder(args)
        results = self.measure(settings, device)
        publish(args, self.name, results, results_markdown(results), results_figure)

    def settings_of(self, args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
        """Return the options that the results depend on."""
        settings = {name: getattr(args, name) for name in (*self.counts, "max_seconds")}
        settings |= device_settings(args, device)
        memory_lengths = args.lengths if args.memory_lengths is None else args.memory_lengths
        settings |= {"lengths": sorted(set(args.lengths)), "memory_lengths": sorted(set(memory_lengths))}
        return {**settings, "encoders": [name for name in self.encoders if name in args.encoders]}

    def shape_of(self, tokens: int, settings: Mapping[str, Any], device: torch.device) -> Shape:
        """Return the shape of the encoders at a length.

        Raises:
            InputError: no square image has so many patches.
        """
        sizes = {name: settings[name] for name in (*self.sizes, "dtype")}
        return Shape(tokens=tokens, device=device.type, **sizes)

    def measure(self, settings: dict[str, Any], device: torch.device) -> dict[str, Any]:
        """Return all results in JSON types: `machine`, `settings`, and `results` with a row per length and encoder."""

        def names_of(tokens: int, settings: Mapping[str, Any]) -> list[str]:
            return list(settings["encoders"])

        rows = Contestants(
            "encoder", self.shape_of, names_of, build_encoder, training_step, build_training_step
        ).measure(settings, device)
        add_ratios(rows)
        return {"machine": describe_machine(device), "settings": settings, "results": rows}
