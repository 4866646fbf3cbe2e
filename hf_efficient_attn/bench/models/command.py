"""Time and memory of whole encoders against transformers' Longformer, LED, BigBird and BERT with the same weights.

Ours are converted from theirs; before anything is timed, their outputs are compared. `self_only`, whose tokens read
only themselves, shows how far any attention could get around the same linear maps. All encoders of a length take turns,
on a CPU each in a process of its own.
A training step is forward, mean squared distance of the last hidden state from a fixed one, backward and AdamW. Times
are in milliseconds, memory is in MiB, lengths are in tokens:
    hf-efficient-attn bench models --peers longformer bert --lengths 512 4096
"""

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from hf_efficient_attn.bench.attention.measure import one_line
from hf_efficient_attn.bench.harness.memory import peak_memory
from hf_efficient_attn.bench.harness.options import (
    add_attention_dropout,
    add_counts,
    add_results,
    add_step_options,
    check_attention_dropout,
    check_counts,
    make_folder,
    set_threads,
)
from hf_efficient_attn.bench.harness.processes import cases_apart
from hf_efficient_attn.bench.harness.report import (
    describe_machine,
    publish,
    resolve_device,
)
from hf_efficient_attn.bench.harness.timing import Timing, time_once, time_within
from hf_efficient_attn.bench.models.cases import (
    ARCHITECTURES,
    OURS,
    SELF_ONLY,
    THEIRS,
    Shape,
    build_cases,
    build_training_step,
    largest_difference,
    read_new_encoder,
)
from hf_efficient_attn.bench.models.report import results_figure, results_markdown
from hf_efficient_attn.bench.models.targets import Row, add_ratios

LENGTHS = [512, 1024, 2048, 4096, 8192, 16384]
MEASURES = ("forward", "training")
COUNTS = {
    "layers": (12, "layers of the models, at most"),
    "hidden_size": (768, "width of the models"),
    "num_heads": (12, "attention heads"),
    "intermediate_size": (3072, "width of the MLP"),
    "batch_size": (1, "examples per step"),
    "layer_tokens": (2048, "long inputs are timed with fewer layers: layers x tokens at most N, at least one layer"),
    "memory_layers": (2, "layers of the models whose peak memory is measured"),
    "repeats": (10, "timed rounds per length, as far as there is time; a round runs every encoder once"),
}
# device -> dtype, and the longest input of transformers' sparse encoders and of the ours that are only their twins
DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {"dtype": "float32", "peer_limit": 4096},
    "cuda": {"dtype": "bfloat16", "peer_limit": 16384},
}
# what is measured at every length: ours of the papers, the bound, and transformers' dense one
UNLIMITED = (("longformer", OURS), ("big_bird", OURS), (SELF_ONLY, OURS), ("bert", THEIRS))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `bench models`."""
    names = list(ARCHITECTURES)
    parser.add_argument(
        "--peers", nargs="+", choices=names, default=names, help="architectures to compare (default all)"
    )
    parser.add_argument(
        "--lengths",
        nargs="+",
        type=int,
        default=LENGTHS,
        metavar="N",
        help="lengths of the input in tokens (default 512 to 16384)",
    )
    add_counts(parser, COUNTS)
    add_attention_dropout(parser)
    add_step_options(parser, "all models", max_seconds=30)
    parser.add_argument(
        "--peer-limit",
        type=int,
        metavar="N",
        help="longest input of transformers' sparse encoders (default 4096, on CUDA 16384)",
    )
    parser.add_argument(
        "--memory-lengths",
        nargs="*",
        type=int,
        default=[4096, 16384],
        metavar="N",
        help="lengths whose peak memory is measured (default 4096 16384)",
    )
    add_results(parser, "outputs/bench_models")


def main(args: argparse.Namespace) -> None:
    """Measure, print the tables, and write models.json, models.md and models.png into `args.output`.

    Raises:
        EfficientAttentionError: a count below 1, a dropout out of range, outputs that differ, CUDA without a device.
    """
    check_counts(args, COUNTS, "lengths")
    check_attention_dropout(args)
    set_threads(args)
    device = resolve_device(args.device)
    make_folder(args)
    results = measure(settings_of(args, device), device)
    publish(args, "models", results, results_markdown(results), results_figure)


def settings_of(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Return the options that the results depend on, with the defaults of the device."""
    settings = {name: getattr(args, name) for name in (*COUNTS, "attention_dropout", "max_seconds")}
    for name, default in DEFAULTS[device.type].items():
        settings[name] = default if getattr(args, name) is None else getattr(args, name)
    lengths = {name: sorted(set(getattr(args, name))) for name in ("lengths", "memory_lengths")}
    return {**settings, **lengths, "peers": list(dict.fromkeys(args.peers))}


def measure(settings: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Return all results in JSON types: `machine`, `settings`, `differences`, `results`.

    `results` has a row per length, architecture and maker; `differences` those of the outputs by architecture and
    length.
    """
    rows: list[Row] = []
    differences: dict[str, dict[str, float]] = {}
    peaks = measure_memory(settings, device)
    for tokens in logging.tqdm(settings["lengths"], desc="lengths", unit="length", leave=False):
        its_rows, its_differences = measure_length(shape_of(settings, tokens, device), settings)
        rows += its_rows
        for name, difference in its_differences.items():
            differences.setdefault(name, {})[str(tokens)] = difference
    for row in rows:
        row["peak_memory_bytes"] = peaks.get((row["model"], row["by"], row["tokens"]))
    add_ratios(rows)
    return {"machine": describe_machine(device), "settings": settings, "differences": differences, "results": rows}


def shape_of(settings: dict[str, Any], tokens: int, device: torch.device) -> Shape:
    """Return the shape of the encoders that are timed at a length."""
    return Shape(
        num_layers=max(1, min(settings["layers"], settings["layer_tokens"] // tokens)),
        hidden_size=settings["hidden_size"],
        num_heads=settings["num_heads"],
        intermediate_size=settings["intermediate_size"],
        tokens=tokens,
        batch_size=settings["batch_size"],
        attention_dropout=settings["attention_dropout"],
        dtype=settings["dtype"],
        device=device.type,
    )


def contestants(settings: dict[str, Any], tokens: int) -> list[tuple[str, str]]:
    """Return (architecture, maker) of the encoders that are measured at a length."""
    pairs = [(name, by) for name in settings["peers"] for by in ARCHITECTURES[name].makers]
    return [pair for pair in pairs if tokens <= settings["peer_limit"] or pair in UNLIMITED]


def measure_length(shape: Shape, settings: dict[str, Any]) -> tuple[list[Row], dict[str, float]]:
    """Return a row per encoder, and the largest difference of outputs per architecture.

    A measure is {"milliseconds": quartiles, "samples"}, or {"reason": why there is none} where transformers' own fails.
    """
    rows: list[Row] = []
    outputs: dict[tuple[str, str], Tensor] = {}
    for name, by in contestants(settings, shape.tokens):
        row: Row = {"model": name, "by": by, "tokens": shape.tokens, "layers": shape.num_layers}
        rows.append(row)
        output = attempt(row, partial(read_new_encoder, name, by, shape))
        if output is not None:
            outputs[name, by] = output
    differences = compare(outputs, shape)
    timings = time_encoders(list(outputs), shape, settings)
    for row in rows:
        for measure in MEASURES:
            timing = timings.get(f"{row['model']} {row['by']} {measure}")
            if timing is not None:
                row[measure] = timing.record(1)
    return rows, differences


def time_encoders(encoders: list[tuple[str, str]], shape: Shape, settings: dict[str, Any]) -> dict[str, Timing]:
    """Return the timings by "architecture maker measure", of rounds in which every encoder has its turn.

    One run of everything before them, in which optimizer states and layouts are made, does not count.
    """
    device = torch.device(shape.device)
    with ExitStack() as processes:
        cases = {
            f"{name} {by} {measure}": case
            for name, by in encoders
            for measure, case in processes.enter_context(cases_apart(build_cases, (name, by, shape), device)).items()
        }
        for case in cases.values():
            time_once(case, device)
        return time_within(cases, settings["repeats"], settings["max_seconds"], shape.tokens, device)


def attempt(row: Row, function: Callable[[], Any]) -> Any:
    """Return what a function returns, or None with the reason in the row if transformers' own fails; ours must not."""
    try:
        return function()
    except Exception as error:
        if row["by"] == OURS:
            raise
        row |= {measure: {"reason": one_line(error)} for measure in MEASURES}
        return None


def compare(outputs: dict[tuple[str, str], Tensor], shape: Shape) -> dict[str, float]:
    """Return the largest difference between ours and theirs for every architecture that both have computed."""
    pairs = {name: (outputs[name, OURS], outputs.get((name, THEIRS))) for name, by in outputs if by == OURS}
    return {
        name: largest_difference(name, ours, theirs, shape)
        for name, (ours, theirs) in pairs.items()
        if theirs is not None
    }


def measure_memory(settings: dict[str, Any], device: torch.device) -> dict[tuple[str, str, int], int]:
    """Return the peak bytes of a training step, beyond the weights, by architecture, maker and length.

    Transformers' own are measured up to `peer_limit`; one that fails there is left out, and fails again when timed.
    """
    lengths = [tokens for tokens in settings["memory_lengths"] if tokens in settings["lengths"]]
    wanted = [(*pair, tokens) for tokens in lengths for pair in contestants(settings, tokens)]
    wanted = [key for key in wanted if key[1] == OURS or key[2] <= settings["peer_limit"]]
    peaks = {}
    for name, by, tokens in logging.tqdm(wanted, desc="memory", unit="encoder", leave=False):
        shape = replace(shape_of(settings, tokens, device), num_layers=settings["memory_layers"])
        arguments = {"name": name, "by": by, "shape": asdict(shape)}
        try:
            peaks[name, by, tokens] = peak_memory(build_training_step, arguments, device)
        except RuntimeError:
            if by == OURS:
                raise
    return peaks
