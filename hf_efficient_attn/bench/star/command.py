"""Time and memory of a Star-Transformer against an LSTM and a dense Transformer.

Encoders of equal width and depth, which take turns: `star`, ours; `dense`, transformers' BERT on torch's SDPA; `lstm`,
torch's LSTM in both directions, each half as wide. A star has no MLP. A training step is a forward and a backward pass.
Times are in milliseconds, memory is in MiB, lengths are in tokens:
    hf-efficient-attn bench star --lengths 64 512 2048 --threads 1
"""

import argparse
from dataclasses import asdict
from typing import Any

import torch
from transformers.utils import logging

from hf_efficient_attn.bench.harness.memory import peak_memory
from hf_efficient_attn.bench.harness.options import (
    add_counts,
    add_results,
    add_step_options,
    check_counts,
    dtype_of,
    make_folder,
    set_threads,
)
from hf_efficient_attn.bench.harness.report import describe_machine, publish, resolve_device
from hf_efficient_attn.bench.harness.steps import forward_step, time_steps
from hf_efficient_attn.bench.star.cases import ENCODERS, Shape, build_encoder, build_training_step, training_step
from hf_efficient_attn.bench.star.report import Row, add_ratios, results_figure, results_markdown
from hf_efficient_attn.errors import InputError

LENGTHS = [64, 128, 256, 512, 1024, 2048]
# {name: (default, help)}; fields of `Shape`
SIZES = {
    "batch_size": (8, "texts"),
    "layers": (4, "updates of the star, layers of the others"),
    "hidden_size": (256, "width"),
    "heads": (8, "heads"),
}
COUNTS = {**SIZES, "repeats": (10, "timed rounds, as far as there is time; a round runs every encoder once")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `bench star`."""
    for name, text in {
        "lengths": "lengths in tokens (default 64 to 2048)",
        "memory_lengths": "which of the lengths peak memory is measured at (default: all)",
    }.items():
        how = "+" if name == "lengths" else "*"
        default = LENGTHS if name == "lengths" else None
        parser.add_argument(f"--{name.replace('_', '-')}", nargs=how, type=int, default=default, metavar="N", help=text)
    parser.add_argument(
        "--encoders", nargs="+", choices=ENCODERS, default=list(ENCODERS), help="encoders to compare (default all)"
    )
    add_counts(parser, COUNTS)
    add_step_options(parser, "all encoders", max_seconds=30)
    add_results(parser, "outputs/bench_star")


def main(args: argparse.Namespace) -> None:
    """Measure, print the tables, and write star.json, star.md and star.png into `args.output`.

    Raises:
        EfficientAttentionError: a count below 1, a width that cannot be divided, or CUDA without a device.
    """
    check_counts(args, COUNTS, "lengths", *(["memory_lengths"] if args.memory_lengths else []))
    if args.hidden_size % (2 * args.heads):
        raise InputError(
            f"hidden_size={args.hidden_size} must be a multiple of 2 · heads={2 * args.heads}: heads divide it, and "
            "the directions of the LSTM."
        )
    set_threads(args)
    device = resolve_device(args.device)
    make_folder(args)
    results = measure(settings_of(args, device), device)
    publish(args, "star", results, results_markdown(results), results_figure)


def settings_of(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Return the options that the results depend on."""
    settings = {name: getattr(args, name) for name in (*COUNTS, "max_seconds")}
    settings["dtype"] = dtype_of(args, device)
    memory_lengths = args.lengths if args.memory_lengths is None else args.memory_lengths
    settings |= {"lengths": sorted(set(args.lengths)), "memory_lengths": sorted(set(memory_lengths))}
    return {**settings, "encoders": [name for name in ENCODERS if name in args.encoders]}


def measure(settings: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Return all results in JSON types: `machine`, `settings`, and `results` with a row per length and encoder."""
    # first, while this process is small
    peaks = measure_memory(settings, device)
    rows: list[Row] = []
    for tokens in logging.tqdm(settings["lengths"], desc="lengths", unit="length", leave=False):
        rows += measure_length(tokens, settings, device)
    for row in rows:
        row["peak_memory_bytes"] = peaks.get((row["tokens"], row["encoder"]))
    add_ratios(rows)
    return {"machine": describe_machine(device), "settings": settings, "results": rows}


def shape_of(tokens: int, settings: dict[str, Any], device: torch.device) -> Shape:
    """Return the shape of the encoders at one length."""
    return Shape(tokens=tokens, device=device.type, **{name: settings[name] for name in (*SIZES, "dtype")})


def measure_memory(settings: dict[str, Any], device: torch.device) -> dict[tuple[int, str], int]:
    """Return the peak bytes of a training step, beyond weights and embeddings, by length and encoder."""
    lengths = [tokens for tokens in settings["lengths"] if tokens in settings["memory_lengths"]]
    wanted = [(tokens, name) for tokens in lengths for name in settings["encoders"]]
    peaks = {}
    for tokens, name in logging.tqdm(wanted, desc="memory", unit="encoder", leave=False):
        arguments = {"name": name, "shape": asdict(shape_of(tokens, settings, device))}
        peaks[tokens, name] = peak_memory(build_training_step, arguments, device)
    return peaks


def measure_length(tokens: int, settings: dict[str, Any], device: torch.device) -> list[Row]:
    """Return a row per encoder, in which each measure is {"milliseconds", "samples"}."""
    shape = shape_of(tokens, settings, device)
    states = shape.states()
    encoders = {name: build_encoder(name, shape) for name in settings["encoders"]}
    steps = {
        name: {"forward": forward_step(encoder, states), "training": training_step(encoder, states)}
        for name, encoder in encoders.items()
    }
    times = time_steps(steps, settings, tokens, device)
    return [{"tokens": tokens, "encoder": name, **times[name]} for name in settings["encoders"]]
