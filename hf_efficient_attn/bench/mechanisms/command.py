"""Time, memory and state of every way to read a text, against its length.

Models of one layer, as wide as each other, which take turns; `--causal` takes those that read to their left, and
decodes behind the text as well: time for one more token, and memory of the cache. A training step is a forward and a
backward pass. Times are in milliseconds, memory is in MiB, lengths are in tokens:
    hf-efficient-attn bench mechanisms --lengths 512 4096 32768 --mechanisms dense band linear --causal
"""

import argparse
from collections.abc import Mapping
from typing import Any

import torch
from transformers.utils import logging

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
from hf_efficient_attn.bench.harness.steps import Contestants, time_steps
from hf_efficient_attn.bench.mechanisms.cases import DENSE_LIMIT, MECHANISMS, MOST_DECODED, SCORES_LIMIT, Shape
from hf_efficient_attn.bench.mechanisms.models import build_model, build_training_step, read_prompt, training_step
from hf_efficient_attn.bench.mechanisms.report import DECODING, results_figure, results_markdown
from hf_efficient_attn.errors import InputError

LENGTHS = [512, 1024, 2048, 4096, 8192, 16384, 32768, 65536]
MEMORY_LENGTHS = [2048, 16384]
# {name: (default, help)}; fields of `Shape`
SIZES = {
    "batch_size": (1, "texts"),
    "hidden_size": (512, "width"),
    "heads": (8, "heads"),
    "keys": (256, "keys that a token reads, about, where that can be chosen"),
}
COUNTS = {
    **SIZES,
    DENSE_LIMIT: (16384, "longest text of what reads all pairs of tokens"),
    SCORES_LIMIT: (4096, "longest text of what holds a score of each pair"),
    "repeats": (10, "timed rounds, as far as there is time; a round runs every mechanism once"),
}
QUICK = {"lengths": [512, 2048], "memory_lengths": [2048], "repeats": 2}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `bench mechanisms`."""
    texts = {
        "lengths": ("+", LENGTHS, "lengths in tokens (default 512 to 65536)"),
        "memory_lengths": ("*", MEMORY_LENGTHS, "which of the lengths peak memory is measured at (default 2048 16384)"),
    }
    for name, (how, default, text) in texts.items():
        parser.add_argument(f"--{name.replace('_', '-')}", nargs=how, type=int, default=default, metavar="N", help=text)
    parser.add_argument(
        "--mechanisms", nargs="+", choices=MECHANISMS, help="what to compare (default all that have the direction)"
    )
    parser.add_argument("--causal", action="store_true", help="tokens read to their left, and are decoded")
    add_counts(parser, COUNTS)
    add_step_options(parser, "all models", max_seconds=30)
    parser.add_argument("--quick", action="store_true", help="unless said otherwise, two lengths and two rounds")
    add_results(parser, "outputs/bench_mechanisms")
    leave_open(parser, *QUICK)


def main(args: argparse.Namespace) -> None:
    """Measure, print the tables, and write mechanisms.json, mechanisms.md and mechanisms.png into `args.output`.

    Raises:
        EfficientAttentionError: a count below 1, a mechanism that has no such direction, more rounds than tokens can
            be decoded, or CUDA without a device.
    """
    fill_options(args, QUICK)
    check_counts(args, COUNTS, "lengths", *(["memory_lengths"] if args.memory_lengths else []))
    able = [name for name, mechanism in MECHANISMS.items() if args.causal in mechanism.directions]
    if missing := [name for name in args.mechanisms or () if name not in able]:
        raise InputError(
            f"--mechanisms {' '.join(missing)}: there is no {'causal' if args.causal else 'bidirectional'} form. Leave "
            f"it out, or take {'away' if args.causal else 'also'} --causal."
        )
    if args.repeats >= MOST_DECODED:
        raise InputError(f"repeats={args.repeats}: at most {MOST_DECODED - 1} tokens are decoded behind a text.")
    set_threads(args)
    device = resolve_device(args.device)
    make_folder(args)
    wanted = [name for name in able if name in (args.mechanisms or able)]
    results = measure(settings_of(args, wanted, device), device)
    publish(args, "mechanisms", results, results_markdown(results), results_figure)


def settings_of(args: argparse.Namespace, mechanisms: list[str], device: torch.device) -> dict[str, Any]:
    """Return the options that the results depend on."""
    settings = {name: getattr(args, name) for name in (*COUNTS, "max_seconds")}
    settings |= device_settings(args, device)
    settings |= {"is_causal": args.causal, "mechanisms": mechanisms}
    return settings | {name: sorted(set(getattr(args, name))) for name in ("lengths", "memory_lengths")}


def measure(settings: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Return all results in JSON types: `machine`, `settings`, and `results` with a row per length and mechanism."""
    contestants = Contestants("mechanism", shape_of, names_of, build_model, training_step, build_training_step)
    rows = contestants.measure(settings, device)
    if settings["is_causal"]:
        for tokens in logging.tqdm(settings["lengths"], desc="decoding", unit="length", leave=False):
            decoded = measure_decoding(tokens, settings, device)
            for row in rows:
                if row["tokens"] == tokens:
                    row |= decoded.get(row["mechanism"], {DECODING: {}, "cache_bytes": None})
    return {"machine": describe_machine(device), "settings": settings, "results": rows}


def measure_decoding(tokens: int, settings: Mapping[str, Any], device: torch.device) -> dict[str, dict[str, Any]]:
    """Return the times of one more token behind a text, and the bytes of the cache behind it, by mechanism."""
    shape = shape_of(tokens, settings, device)
    steps, sizes = {}, {}
    for name in names_of(tokens, settings):
        step, sizes[name] = read_prompt(build_model(name, shape), shape.states())
        steps[name] = {DECODING: step}
    times = time_steps(steps, settings, tokens, device)
    return {name: {**times[name], "cache_bytes": sizes[name]} for name in steps}


def shape_of(tokens: int, settings: Mapping[str, Any], device: torch.device) -> Shape:
    """Return the shape of the models at one length."""
    sizes = {name: settings[name] for name in (*SIZES, "is_causal", "dtype")}
    return Shape(tokens=tokens, device=device.type, **sizes)


def names_of(tokens: int, settings: Mapping[str, Any]) -> list[str]:
    """Return what is measured at a length."""
    limits = {name: MECHANISMS[name].limit for name in settings["mechanisms"]}
    return [name for name, limit in limits.items() if limit is None or tokens <= settings[limit]]
