"""Measure what attention costs on this machine, by which backends and lengths of blocks are chosen from then on.

Costs are times in scores of torch's dense attention: of a score in blocks of each length, with a mask, by the kernel
for caps, terms and dropout; of a key, of a call. They are kept in the user's cache, and replace those that the package
has of the most similar machine for this processor. How attention is computed changes, not what. It takes about a
minute; the fastest round counts, and nothing is kept if rounds disagree, as they do beside other work. To go back to
the costs of the package, delete the file that it names; HF_EFFICIENT_ATTN_MACHINES names another. With `--check`
follows a table of how far "auto" is from the best of all backends and lengths of blocks, the shortest lengths first:
    hf-efficient-attn bench calibrate --threads 1
    hf-efficient-attn bench calibrate --show-only --check --lengths 128 1024 8192
    hf-efficient-attn bench calibrate --show-only --check --max-seconds 2 --max-minutes 10
"""

import argparse
from typing import Any

import torch

from hf_efficient_attn.backends.machine_costs import (
    Machine,
    machine_of,
    on_machine,
    path_of_measured,
    processor_of,
    remember,
)
from hf_efficient_attn.bench.attention.cases import Shape
from hf_efficient_attn.bench.calibrate.check import PATTERNS, check
from hf_efficient_attn.bench.calibrate.measure import Calibration
from hf_efficient_attn.bench.calibrate.report import results_markdown
from hf_efficient_attn.bench.harness.options import (
    add_counts,
    add_device,
    add_dtype,
    add_max_seconds,
    add_results,
    check_counts,
    dtype_of,
    make_folder,
    set_threads,
)
from hf_efficient_attn.bench.harness.report import describe_machine, publish, resolve_device

COUNTS = {"repeats": (10, "rounds; each runs every case once")}
DTYPES = (torch.float32, torch.bfloat16)
NUM_HEADS, HEAD_DIM = 8, 64
LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
# the part by which the median round may exceed the fastest
MAX_DISAGREEMENT = 0.1
# fewer agree by chance
LEAST_ROUNDS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `bench calibrate`."""
    add_counts(parser, COUNTS)
    add_device(parser)
    parser.add_argument("--threads", type=int, metavar="N", help="threads of torch (default: as torch chooses)")
    parser.add_argument("--show-only", action="store_true", help="keep nothing in the user's cache")
    parser.add_argument("--check", action="store_true", help="compare what is chosen with every other way")
    parser.add_argument(
        "--lengths", nargs="+", type=int, default=LENGTHS, metavar="N", help="lengths that --check tries"
    )
    parser.add_argument(
        "--patterns", nargs="+", default=PATTERNS, metavar="P", help="and its patterns, as in bench attention"
    )
    add_dtype(parser, "what --check compares")
    add_max_seconds(parser, 4.0)
    parser.add_argument(
        "--max-minutes",
        type=float,
        metavar="M",
        help="when --check ends, with what it has tried (default: no limit)",
    )
    add_results(parser, "outputs/bench_calibrate")


def main(args: argparse.Namespace) -> None:
    """Measure, keep the costs, print the tables, and write calibrate.json and calibrate.md into `args.output`.

    Raises:
        EfficientAttentionError: a count or length below 1, or no such device.
    """
    check_counts(args, COUNTS, "lengths")
    set_threads(args)
    device = resolve_device(args.device)
    make_folder(args)
    machine, differs = measured(device, args.repeats)
    is_kept = not args.show_only and differs <= MAX_DISAGREEMENT and args.repeats >= LEAST_ROUNDS
    results: dict[str, Any] = {"machine": describe_machine(device), "before": machine_of(device.type).source}
    results |= {"calibration": machine.to_dict(), "kept": str(path_of_measured()) if is_kept else None}
    results |= {"disagreement": differs, "most_disagreement": MAX_DISAGREEMENT}
    results |= {"rounds": args.repeats, "least_rounds": LEAST_ROUNDS}
    if is_kept:
        remember(machine)
    if args.check:
        with on_machine(machine):
            shape = Shape(1, NUM_HEADS, HEAD_DIM, dtype_of(args, device), device.type)
            limits = (args.max_seconds, None if args.max_minutes is None else 60 * args.max_minutes)
            results["check"] = check(args.patterns, sorted(set(args.lengths)), shape, *limits)
    publish(args, "calibrate", results, results_markdown(results))


def measured(device: torch.device, repeats: int) -> tuple[Machine, float]:
    """Return the machine with the costs that are measured now, and by how much the rounds disagree."""
    machine = describe_machine(device)
    source = f"measured on {machine['date'][:10]} with torch {machine['torch']}, {machine['torch_threads']} threads"
    found = {str(dtype).removeprefix("torch."): Calibration(device, dtype).measure(repeats) for dtype in DTYPES}
    costs = tuple((name, each) for name, (each, _) in found.items())
    return Machine(processor_of(device.type), source, costs), max(differs for _, differs in found.values())
