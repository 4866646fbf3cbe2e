"""Time and memory of attention with a pattern against dense attention and against other libraries, in one run.

The headline is the useful-pair efficiency: the allowed pairs computed per second, over the pairs per second of torch's
dense SDPA without a mask in the same round. All calls of a length take turns. Times are in milliseconds, memory is in
MiB, lengths are in tokens. Patterns are presets or expressions:
    hf-efficient-attn bench attention --patterns band "band(64, 64) | global(0)" --lengths 4096 8192 --backends auto
"""

import argparse
import sys
from dataclasses import asdict
from typing import Any

import torch
from transformers.utils import logging

from hf_efficient_attn.attention.select import AUTO, BACKENDS
from hf_efficient_attn.bench.attention.cases import DENSE, PRESETS, Shape, build_step, pattern_of
from hf_efficient_attn.bench.attention.figure import results_figure
from hf_efficient_attn.bench.attention.measure import measure_length
from hf_efficient_attn.bench.attention.overhead import measure_overhead
from hf_efficient_attn.bench.attention.peers import PEERS
from hf_efficient_attn.bench.attention.profile import profile_calls
from hf_efficient_attn.bench.attention.profile_report import profile_markdown
from hf_efficient_attn.bench.attention.report import results_markdown
from hf_efficient_attn.bench.attention.summary import add_ratios
from hf_efficient_attn.bench.harness.memory import peak_memory
from hf_efficient_attn.bench.harness.options import (
    add_counts,
    add_device,
    add_dtype,
    add_max_seconds,
    add_results,
    check_counts,
    fill_options,
    leave_open,
    make_folder,
    refuse_given,
)
from hf_efficient_attn.bench.harness.report import (
    describe_machine,
    publish,
    resolve_device,
)
from hf_efficient_attn.errors import InputError

PATTERNS = ["band", "longformer", "bigbird", "dilated"]
LENGTHS = [128, 512, 2048, 4096, 8192, 16384, 32768, 65536, 131072]
COUNTS = {
    "batch_size": (1, "examples per call"),
    "heads": (8, "attention heads"),
    "head_dim": (64, "width of a head"),
    "repeats": (20, "timed rounds per length, as far as there is time; a round runs every call once"),
}
# device -> dtype, and the longest lengths of dense attention and of peers
DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {"dtype": "float32", "dense_limit": 8192, "peer_limit": 4096},
    "cuda": {"dtype": "bfloat16", "dense_limit": 131072, "peer_limit": 32768},
}
# memory is measured at longer ones only
QUICK = {"patterns": ["band", "longformer"], "lengths": [512, 2048, 4096], "max_seconds": 5.0}
# options that are for other calls than the fixed ones of `--profile`
NOT_PROFILED = ("patterns", "lengths", "backends", "peers", "dense_limit", "peer_limit", "memory_from", "no_memory")
# transformers compiles one function for all masks and lengths; torch would give up after a few
RECOMPILE_LIMIT = 512


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `bench attention`."""
    backends = [AUTO, *sorted(BACKENDS)]
    text = f"some of {', '.join(PRESETS)}, or expressions (default {' '.join(PATTERNS)})"
    parser.add_argument("--patterns", nargs="+", default=PATTERNS, metavar="P", help=text)
    text = "lengths of the input in tokens (default 128 to 131072)"
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS, metavar="N", help=text)
    text = "backends of this package (default auto flex)"
    parser.add_argument("--backends", nargs="+", choices=backends, default=[AUTO, "flex"], help=text)
    text = "other libraries (default all)"
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=list(PEERS), help=text)
    add_counts(parser, COUNTS)
    add_dtype(parser, "the inputs")
    add_device(parser)
    add_max_seconds(parser, 25)
    text = "longest dense call that is timed; longer ones are extrapolated (default 8192, on CUDA 131072)"
    parser.add_argument("--dense-limit", type=int, metavar="N", help=text)
    text = "longest call of other libraries (default 4096, on CUDA 32768)"
    parser.add_argument("--peer-limit", type=int, metavar="N", help=text)
    text = "shortest length whose peak memory is measured (default 65536)"
    parser.add_argument("--memory-from", type=int, default=65536, metavar="N", help=text)
    parser.add_argument("--no-memory", action="store_true", help="do not measure peak memory")
    parser.add_argument("--quick", action="store_true", help="unless said otherwise, two patterns up to 4,096 tokens")
    text = "show where the time of some fixed calls goes, instead (CPU)"
    parser.add_argument("--profile", action="store_true", help=text)
    add_results(parser, "outputs/bench_attention")
    leave_open(parser, "max_seconds", *NOT_PROFILED)


def main(args: argparse.Namespace) -> None:
    """Measure, print the tables, and write attention.json, attention.md and attention.png into `args.output`.

    Raises:
        EfficientAttentionError: a count below 1, an unknown pattern, a backend that cannot compute it, `--device cuda`
            without a CUDA device or with `--profile`, or options that `--profile` makes no use of.
    """
    if args.profile:
        refuse_given(args, "--profile", NOT_PROFILED)
    fill_options(args, QUICK)
    check_counts(args, COUNTS, "lengths")
    if args.profile and args.device == "cuda":
        raise InputError("device='cuda' cannot be profiled: --profile looks into the kernels of CPUs. Use 'cpu'.")
    device = resolve_device("cpu" if args.profile else args.device)
    settings = settings_of(args, device)
    make_folder(args)
    if args.profile:
        shape = Shape(args.batch_size, args.heads, args.head_dim, settings["dtype"], device.type)
        profile = profile_calls(shape, args.repeats, args.max_seconds)
        publish(args, "profile", profile, profile_markdown(profile))
        return
    for name in settings["patterns"]:
        pattern_of(name, max(settings["lengths"])).heads(args.heads)
    with torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT, accumulated_recompile_limit=RECOMPILE_LIMIT):
        results = measure(settings, device)
    publish(args, "attention", results, results_markdown(results), results_figure)


def settings_of(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Return the options that the results depend on, with the defaults of the device."""
    settings = {name: getattr(args, name) for name in (*COUNTS, "max_seconds", "memory_from", "no_memory")}
    for name, default in DEFAULTS[device.type].items():
        settings[name] = default if getattr(args, name) is None else getattr(args, name)
    lists = {name: list(dict.fromkeys(getattr(args, name))) for name in ("patterns", "backends", "peers")}
    return {**settings, **lists, "lengths": sorted(set(args.lengths))}


def measure(settings: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Return all results in JSON types: `machine`, `settings`, `overhead`, `dense`, `results`.

    `dense` has a row per length, `results` one per pattern, length and contestant (a backend of ours or a peer);
    `overhead` has one per pattern and length of its own.
    """
    shape = Shape(settings["batch_size"], settings["heads"], settings["head_dim"], settings["dtype"], device.type)
    print("Measuring the overhead of short calls ...", file=sys.stderr)
    overhead = measure_overhead(shape, settings["repeats"])
    dense, rows = [], []
    for tokens in logging.tqdm(settings["lengths"], desc="lengths", unit="length", leave=False):
        dense_row, its_rows = measure_length(tokens, shape, settings)
        dense.append(dense_row)
        rows += its_rows
    measure_memory(settings, shape, dense, rows)
    add_ratios(dense, rows)
    results = {"machine": describe_machine(device), "settings": settings, "overhead": overhead}
    return {**results, "dense": dense, "results": rows}


def measure_memory(
    settings: dict[str, Any], shape: Shape, dense: list[dict[str, Any]], rows: list[dict[str, Any]]
) -> None:
    """Write the peak bytes of forward and backward, beyond the inputs, into the rows of ours and of dense attention."""
    wanted = [row for row in [*dense, *rows] if not settings["no_memory"] and is_memory_measured(row, settings)]
    for row in logging.tqdm(wanted, desc="memory", unit="call", leave=False):
        arguments = {"name": row["pattern"], "tokens": row["tokens"], "backend": row["contestant"]}
        row["peak_memory_bytes"] = peak_memory(
            build_step, {**arguments, "shape": asdict(shape)}, torch.device(shape.device)
        )


def is_memory_measured(row: dict[str, Any], settings: dict[str, Any]) -> bool:
    """Return whether a row is of ours or dense, long enough, and was timed forward and backward."""
    is_own = row["contestant"] in (DENSE, *settings["backends"])
    return is_own and row["tokens"] >= settings["memory_from"] and "milliseconds" in row["forward_backward"]
