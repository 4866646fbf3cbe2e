"""Measure time and memory of attention with a pattern, against dense attention and other libraries.

    hf-efficient-attn bench attention --quick
    hf-efficient-attn bench attention --patterns band "band(64, 64) | global(0)" --lengths 4096 8192 --backends auto

The main number is the useful-pair efficiency: the number of pairs that the pattern allows, divided by the time of the
call, relative to the pairs per second of torch's dense scaled_dot_product_attention without a mask. Each round runs
every call of a length once, and both speeds are from the same round. Times are in milliseconds, memory is in MiB,
lengths are in tokens.
"""

import argparse
import os
import sys
import time
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from hf_efficient_attn.attention.explain_call import allowed_pairs
from hf_efficient_attn.attention.select import AUTO, BACKENDS, select
from hf_efficient_attn.backends.blocked import backend as blocked
from hf_efficient_attn.backends.flash import backend as flash
from hf_efficient_attn.backends.flash.execute import make_kernels
from hf_efficient_attn.backends.flex import backend as flex
from hf_efficient_attn.backends.kernels import is_fused
from hf_efficient_attn.backends.machine_costs import costs_of
from hf_efficient_attn.bench.attention_report import add_ratios, results_figure, results_markdown
from hf_efficient_attn.bench.cases import (
    DENSE,
    PRESETS,
    Call,
    Shape,
    build_step,
    call_of,
    clear_caches,
    decode_case,
    decode_lengths,
    dense_call,
    measure_overhead,
    own_call,
    pattern_of,
    repeated,
)
from hf_efficient_attn.bench.memory import peak_memory
from hf_efficient_attn.bench.options import (
    RECOMPILE_LIMIT,
    add_counts,
    add_device,
    add_dtype,
    add_max_seconds,
    add_results,
    check_counts,
    fill_options,
    leave_open,
    make_folder,
)
from hf_efficient_attn.bench.peers import PEERS, Problem, build_peer, peers_of
from hf_efficient_attn.bench.report import Row, describe_machine, one_line, publish, resolve_device
from hf_efficient_attn.bench.timing import Case, Timing, synchronize, time_once, time_within
from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.layout.block_table import block_table
from hf_efficient_attn.layout.call import AttentionCall
from hf_efficient_attn.layout.compile import compile_layout
from hf_efficient_attn.layout.layout import Layout

MEASURES = ("forward", "forward_backward", "decode")
# short calls are timed several at once; the most seconds, tokens and calls of one sample
SAMPLE_SECONDS = 0.05
SAMPLE_TOKENS = 4096
SAMPLE_CALLS = 16
PATTERNS = ["band", "longformer", "bigbird", "dilated"]
LENGTHS = [128, 512, 2048, 4096, 8192, 16384, 32768, 65536, 131072]
COUNTS = {
    "batch_size": (1, "batch size: examples in a call"),
    "heads": (8, "attention heads"),
    "head_dim": (64, "width of a head"),
    "repeats": (20, "largest number of timed rounds for each length; a round runs every call once"),
}
# device -> dtype, and the longest lengths of dense attention and of peers
DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {"dtype": "float32", "dense_limit": 8192, "peer_limit": 4096, "backends": [AUTO, "flex"]},
    "cuda": {"dtype": "bfloat16", "dense_limit": 131072, "peer_limit": 32768, "backends": [AUTO, "flash", "flex"]},
}
# memory is measured only at longer lengths
QUICK = {"patterns": ["band", "longformer"], "lengths": [512, 2048, 4096], "max_seconds": 5.0}


def measure_length(tokens: int, shape: Shape, settings: dict[str, Any]) -> tuple[Row, list[Row]]:
    """Return the row of dense attention, and the rows of all patterns and contestants.

    A measure is either {"milliseconds": quartiles} of one call or decoding step, or {"reason": why there is none}.
    """
    inputs = shape.tensors(tokens)
    rows = [new_row("full", tokens, DENSE)]
    for name in settings["patterns"]:
        of_pattern = [*settings["backends"], *peers_of(name, settings["peers"])]
        rows += [new_row(name, tokens, contestant) for contestant in of_pattern]
    passes: dict[str, Case] = {}
    steps: dict[str, Case] = {}
    for index, row in enumerate(rows):
        is_ours = is_own(row, settings)
        passes |= {f"{index} {measure}": case for measure, case in probe(row, inputs, settings).items()}
        if is_ours:
            steps |= {f"{index} decode": case for case in probe_decode(row, inputs)}
    for cases in (passes, steps):
        timings = time_within(
            cases, settings["repeats"], settings["max_seconds"], f"{tokens:,} tokens", inputs[0].device
        )
        write_timings(rows, timings)
    for row in rows[1:]:
        describe(row, shape, is_own(row, settings))
    return rows[0], rows[1:]


def new_row(name: str, tokens: int, contestant: str) -> Row:
    """Return a row in which nothing is measured yet."""
    missing = {"reason": "not measured."}
    row = {"pattern": name, "tokens": tokens, "contestant": contestant, **dict.fromkeys(MEASURES, missing)}
    return {**row, "first_call_milliseconds": None, "peak_memory_bytes": None}


def is_own(row: Row, settings: dict[str, Any]) -> bool:
    """Return whether a row is of one of our backends or of dense attention."""
    return row["contestant"] in (DENSE, *settings["backends"])


def build(row: Row, inputs: list[Tensor], settings: dict[str, Any]) -> Call | str:
    """Return the call of a row, or the sentence that says why there is none."""
    tokens, contestant = row["tokens"], row["contestant"]
    if contestant == DENSE:
        limit = settings["dense_limit"]
        return dense_call(inputs) if tokens <= limit else f"measured only up to {limit:,} tokens."
    if contestant in settings["backends"]:
        return own_call(pattern_of(row["pattern"], tokens), inputs, contestant)
    first, last = PEERS[contestant].from_tokens, settings["peer_limit"]
    if not first <= tokens <= last:
        return f"measured only from {first:,} to {last:,} tokens."
    return build_peer(contestant, Problem(row["pattern"], inputs))


def probe(row: Row, inputs: list[Tensor], settings: dict[str, Any]) -> dict[str, Case]:
    """Run the passes of a row once and return those that can be timed; the others get a reason."""
    try:
        call = build(row, inputs, settings)
        reason = call if isinstance(call, str) else None
    # kernels may raise anything, and the other rows are still of use
    except Exception as error:
        reason = one_line(error)
    if reason is not None or isinstance(call, str):
        row["forward"] = row["forward_backward"] = {"reason": reason}
        return {}
    device = inputs[0].device
    out: list[Tensor] = []
    start = time.perf_counter()
    if not attempt(row, "forward", Case(lambda _: out.append(call.run_forward())), device):
        row["forward_backward"] = row["forward"]
        return {}
    row["first_call_milliseconds"] = 1000 * (time.perf_counter() - start)
    cases = {"forward": call.forward_case()}
    if call.no_backward is not None:
        row["forward_backward"] = {"reason": call.no_backward}
    else:
        training = call.forward_backward_case(torch.ones_like(out[0]))
        if attempt(row, "forward_backward", training, device):
            cases["forward_backward"] = training
    row["calls"] = {measure: calls_per_sample(case, row["tokens"], device) for measure, case in cases.items()}
    return {measure: repeated(case, row["calls"][measure]) for measure, case in cases.items()}


def probe_decode(row: Row, inputs: list[Tensor]) -> list[Case]:
    """Return the case of decoding, or none if the pattern has no causal form or the backend refuses it."""
    try:
        case = decode_case(row["pattern"], inputs, row["contestant"])
    except ConfigurationError as error:
        row["decode"] = {"reason": one_line(error)}
        return []
    return [case] if attempt(row, "decode", case, inputs[0].device) else []


def calls_per_sample(case: Case, tokens: int, device: torch.device) -> int:
    """Return how many calls are timed together, as one sample."""
    limit = min(SAMPLE_CALLS, SAMPLE_TOKENS // tokens)
    return 1 if limit <= 1 else max(1, min(limit, int(SAMPLE_SECONDS / time_once(case, device))))


def attempt(row: Row, measure: str, case: Case, device: torch.device) -> bool:
    """Run a case once and return whether it could run; if not, write the reason into the row."""
    try:
        time_once(case, device)
    # see `probe`
    except Exception as error:
        row[measure] = {"reason": one_line(error)}
        return False
    return True


def write_timings(rows: list[Row], timings: dict[str, Timing]) -> None:
    """Write milliseconds into the rows, and every sample, so that rounds can be compared."""
    for key, timing in timings.items():
        index, measure = key.split()
        row = rows[int(index)]
        units = len(decode_lengths(row["tokens"])) if measure == "decode" else row["calls"][measure]
        row[measure] = timing.record(units)


def describe(row: Row, shape: Shape, is_ours: bool) -> None:
    """Write the number of pairs into a row; for ours, also the backend and the time to build its layout."""
    tokens = row["tokens"]
    layout = Layout(pattern_of(row["pattern"], tokens), shape.num_heads, tokens, tokens)
    row |= {"num_heads": shape.num_heads, "allowed_pairs": allowed_pairs(layout)}
    if is_ours and "milliseconds" in row["forward"]:
        call = call_of(layout, shape)
        chosen = select(call, row["contestant"])
        row["backend"] = chosen.NAME
        row["computed_pairs"] = chosen.computed_pairs(call)
        row["layout_milliseconds"] = 1000 * layout_seconds(call, row["contestant"])


def layout_seconds(call: AttentionCall, backend: str) -> float:
    """Return the seconds to choose a backend and to build what it needs for the pattern, with empty caches."""
    device = torch.device(call.inputs.device)
    clear_caches()
    start = time.perf_counter()
    name = select(call, backend).NAME
    if name == blocked.NAME:
        compile_layout(call.layout, costs_of(call).forward.of_kernel(is_fused(call)), device)
    elif name == flex.NAME:
        block_table(call.layout, None, flex.BLOCK_SIZES[call.inputs.device], device)
    elif name == flash.NAME:
        make_kernels(call, device)
    synchronize(device)
    return time.perf_counter() - start


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `bench attention`."""
    backends = [AUTO, *sorted(BACKENDS)]
    text = f"patterns: names ({', '.join(PRESETS)}) or expressions (default {' '.join(PATTERNS)})"
    parser.add_argument("--patterns", nargs="+", default=PATTERNS, metavar="P", help=text)
    text = "lengths of the sequences in tokens (default 128 to 131072)"
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS, metavar="N", help=text)
    text = f"backends of this package: {', '.join(backends)} (default auto flex; on a GPU auto flash flex)"
    parser.add_argument("--backends", nargs="+", choices=backends, metavar="BACKEND", help=text)
    text = f"what else to compare with: {', '.join(PEERS)} (default all that are installed); masked is torch's "
    text += "attention with the pattern as a mask"
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=list(PEERS), metavar="PEER", help=text)
    add_counts(parser, COUNTS)
    add_dtype(parser, "the inputs")
    add_device(parser)
    add_max_seconds(parser, 25)
    text = (
        "longest sequence, in tokens, on which dense attention is timed; longer ones are extrapolated (default 8192, "
    )
    text += "on a GPU 131072)"
    parser.add_argument("--dense-limit", type=int, metavar="N", help=text)
    text = "longest sequence, in tokens, on which other libraries are timed (default 4096, on a GPU 32768)"
    parser.add_argument("--peer-limit", type=int, metavar="N", help=text)
    text = "shortest length, in tokens, at which peak memory is measured (default 65536)"
    parser.add_argument("--memory-from", type=int, default=65536, metavar="N", help=text)
    parser.add_argument("--no-memory", action="store_true", help="do not measure peak memory")
    parser.add_argument("--quick", action="store_true", help="measure two patterns up to 4,096 tokens")
    add_results(parser, "outputs/bench_attention")
    leave_open(parser, *QUICK)


def main(args: argparse.Namespace) -> None:
    """Measure, print the tables, and write attention.json, attention.md and attention.png into `args.output`.

    Raises:
        EfficientAttentionError: a count below 1, an unknown pattern, a backend that cannot compute it, or
            `--device cuda` without a CUDA device.
    """
    fill_options(args, QUICK)
    check_counts(args, COUNTS, "lengths")
    device = resolve_device(args.device)
    settings = settings_of(args, device)
    make_folder(args)
    for name in settings["patterns"]:
        pattern_of(name, max(settings["lengths"])).heads(args.heads)
    print(waiting_threads(), file=sys.stderr)
    with torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT, accumulated_recompile_limit=RECOMPILE_LIMIT):
        results = measure(settings, device)
    publish(args, "attention", results, results_markdown(results), results_figure)


def waiting_threads() -> str:
    """Return how the environment lets OpenMP threads wait for each other, with a warning if that costs time."""
    known = {name: os.environ.get(name) for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    text = (
        ", ".join(f"{name} {'is not set' if value is None else f'is {value}'}" for name, value in known.items()) + "."
    )
    idle = (os.cpu_count() or 1) - torch.get_num_threads()
    is_busy = hasattr(os, "getloadavg") and os.getloadavg()[0] > idle + 0.5
    if is_busy and torch.get_num_threads() > 1 and not any(known.values()):
        text += (
            " Other programs are running on this machine. If one of the threads has no core, the others spin until it "
            "is done, and calls take several times as long. Set OMP_WAIT_POLICY=PASSIVE, or measure while the machine "
            "is idle."
        )
    return text


def settings_of(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Return the options that the results depend on, with the defaults of the device."""
    settings = {name: getattr(args, name) for name in (*COUNTS, "max_seconds", "memory_from", "no_memory")}
    for name, default in DEFAULTS[device.type].items():
        settings[name] = default if getattr(args, name) is None else getattr(args, name)
    lists = {"patterns": args.patterns, "backends": settings["backends"], "peers": args.peers}
    return {
        **settings,
        **{name: list(dict.fromkeys(each)) for name, each in lists.items()},
        "lengths": sorted(set(args.lengths)),
    }


def measure(settings: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Return all results in JSON types: `machine`, `settings`, `overhead`, `dense`, `results`.

    `dense` has a row per length, `results` one per pattern, length and contestant (one of our backends or a peer);
    `overhead` has one per pattern and length of `measure_overhead`.
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
    """Write the peak bytes of forward and backward, beyond the inputs, into our rows and those of dense attention."""
    wanted = [row for row in [*dense, *rows] if not settings["no_memory"] and is_memory_measured(row, settings)]
    for row in logging.tqdm(wanted, desc="memory", unit="call", leave=False):
        arguments = {"name": row["pattern"], "tokens": row["tokens"], "backend": row["contestant"]}
        row["peak_memory_bytes"] = peak_memory(
            build_step, {**arguments, "shape": asdict(shape)}, torch.device(shape.device)
        )


def is_memory_measured(row: dict[str, Any], settings: dict[str, Any]) -> bool:
    """Return whether a row is of ours or dense, long enough, and was timed forward and backward."""
    return (
        is_own(row, settings) and row["tokens"] >= settings["memory_from"] and "milliseconds" in row["forward_backward"]
    )
