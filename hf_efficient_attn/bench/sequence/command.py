"""Bytes and time of processes that share a text, by how they get each other's keys.

Of one layer, forward and backward: `halo`, the keys that the pattern reads, computing while they travel; `halo,
waiting`, the same without computing meanwhile; `all-gather`, all keys, as engines do that do not know the pattern;
`heads`, whole texts of some heads (Ulysses). All use the same kernels, and take turns. Processes are on this machine; a
link of so many gigabits per second between them is simulated, 0 is none:
    hf-efficient-attn bench sequence --processes 2 4 --gigabits 0 1
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing import start_processes

from hf_efficient_attn.attention.explain import explain
from hf_efficient_attn.bench.harness.options import (
    DTYPES,
    add_counts,
    add_results,
    check_counts,
    fill_options,
    leave_open,
    make_folder,
)
from hf_efficient_attn.bench.harness.processes import fresh_processes
from hf_efficient_attn.bench.harness.report import describe_machine, publish
from hf_efficient_attn.bench.harness.timing import summarize, times_faster
from hf_efficient_attn.bench.sequence.contestants import ALL_GATHER
from hf_efficient_attn.bench.sequence.report import results_figure, results_markdown
from hf_efficient_attn.bench.sequence.worker import Sample, work
from hf_efficient_attn.errors import EfficientAttentionError, InputError
from hf_efficient_attn.patterns.expressions import parse_pattern

PATTERN = "band(1024, 0)"
COUNTS = {
    "tokens": (131072, "tokens of the text"),
    "heads": (8, "query heads"),
    "key_heads": (2, "key heads"),
    "head_dim": (64, "width of a head"),
    "batch_size": (1, "texts"),
    "threads": (1, "threads of torch in each process"),
    "repeats": (3, "rounds; each runs every way once, after one that is not counted"),
}
QUICK = {"tokens": 8192, "processes": [2], "repeats": 2}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `bench sequence`."""
    parser.add_argument("--pattern", default=PATTERN, help="who reads whom (default %(default)s)")
    parser.add_argument(
        "--processes", nargs="+", type=int, default=[2, 4], metavar="N", help="how many share the text (default 2 4)"
    )
    parser.add_argument(
        "--gigabits", nargs="+", type=float, default=[0, 1], metavar="G", help="speed of the link (default 0 1)"
    )
    add_counts(parser, COUNTS)
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="dtype of the states (default %(default)s)")
    parser.add_argument(
        "--quick", action="store_true", help="unless said otherwise, 8192 tokens, 2 processes and 2 rounds"
    )
    add_results(parser, "outputs/bench_sequence")
    leave_open(parser, *QUICK)


def main(args: argparse.Namespace) -> None:
    """Measure, print the table, and write sequence.json, sequence.md and sequence.png into `args.output`.

    Raises:
        EfficientAttentionError: a count below 1, fewer than two processes, heads or a pattern that do not fit.
    """
    fill_options(args, QUICK)
    check_counts(args, COUNTS, "processes")
    if min(args.processes) < 2:
        raise InputError(f"processes={min(args.processes)} share no text. Give at least 2.")
    if min(args.gigabits) < 0:
        raise InputError(f"gigabits={min(args.gigabits)} must be at least 0, which is as fast as this machine.")
    settings = settings_of(args)
    make_folder(args)
    results = measure(settings)
    publish(args, "sequence", results, results_markdown(results), results_figure)


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options that the results depend on."""
    settings = {name: getattr(args, name) for name in (*COUNTS, "dtype")}
    # refused here, before any process is started
    parse_pattern(args.pattern)
    settings["pattern"] = args.pattern
    return {**settings, **{name: sorted(set(getattr(args, name))) for name in ("processes", "gigabits")}}


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """Return all results in JSON types: `machine`, `settings`, `results` with a row per processes, link and way.

    Raises:
        EfficientAttentionError: processes sent other than `explain` says.
    """
    rows = []
    for count in settings["processes"]:
        found = run_processes(count, settings)
        rows += rows_of(count, settings, found)
        check_bytes(count, settings, rows)
    return {"machine": describe_machine(torch.device("cpu")), "settings": settings, "results": rows}


def run_processes(count: int, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what each of `count` processes has measured."""
    method = fresh_processes().get_start_method()
    with tempfile.TemporaryDirectory() as folder:
        start_processes(work, (count, settings, folder), count, start_method=method)
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(count)]


def rows_of(count: int, settings: dict[str, Any], found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row per link and way: times are those of the slowest process, bytes of the one that sends most."""
    by_process = [{(each["gigabits"], each["way"], each["round"]): each for each in one["samples"]} for one in found]
    rounds = range(settings["repeats"])
    rows = []
    for gigabits, way in dict.fromkeys(key[:2] for key in by_process[0]):
        samples = [[each[gigabits, way, number] for each in by_process] for number in rounds]
        others = [[each[gigabits, ALL_GATHER, number] for each in by_process] for number in rounds]
        row: dict[str, Any] = {"processes": count, "gigabits": gigabits, "way": way}
        for name in ("forward_bytes", "backward_bytes", "reduced_bytes"):
            row[name] = max(each[name] for each in samples[0])
        for name in ("forward_seconds", "seconds"):
            own, theirs = (slowest(each, name) for each in (samples, others))
            row[name] = {**summarize(own), "samples": own}
            row[f"{name}_against_all_gather"] = times_faster(own, theirs)
        row["resident_bytes"] = max(each["resident_bytes"] for each in found)
        rows.append(row)
    return rows


def slowest(samples: list[list[Sample]], name: str) -> list[float]:
    """Return the seconds of the slowest process in every round."""
    return [max(each[name] for each in of_round) for of_round in samples]


def check_bytes(count: int, settings: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Raise EfficientAttentionError if other bytes were sent than `explain` says."""
    heads = {"num_heads": settings["heads"], "num_key_heads": settings["key_heads"], "head_dim": settings["head_dim"]}
    dtype = getattr(torch, settings["dtype"])
    said: Any = explain(settings["pattern"], settings["tokens"], dtype=dtype, sequence_ranks=count, **heads).exchange
    expected = {
        said.mode: (max(said.forward_bytes), max(said.backward_bytes)),
        ALL_GATHER: (said.gathered_bytes, said.gathered_bytes),
    }
    for row in rows:
        sent = (row["forward_bytes"], row["backward_bytes"])
        wanted = expected.get(row["way"])
        if row["processes"] == count and wanted and sent != tuple(settings["batch_size"] * each for each in wanted):
            raise EfficientAttentionError(
                f"{row['way']} among {count} processes sent {sent} bytes, forward and backward, but {wanted} of each "
                "text were expected. Report this."
            )
