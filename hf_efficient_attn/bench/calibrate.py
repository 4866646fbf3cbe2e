"""Measure the costs of attention on this machine, and use them from then on to choose backends and block sizes.

    hf-efficient-attn bench calibrate --threads 1
    hf-efficient-attn bench calibrate --show-only --check --lengths 128 1024 8192
    hf-efficient-attn bench calibrate --show-only --check --max-seconds 2 --max-minutes 10

It takes about a minute on an idle machine. The costs are kept in the user's cache and replace the package's costs of
the most similar processor. They change how attention is computed, not its result. Every case is timed in several
rounds, and its cost is from the fastest one. If rounds differ too much, for example because other programs are running,
nothing is kept. To go back to the costs of the package, delete the file whose path is printed. The environment variable
HF_EFFICIENT_ATTN_MACHINES names another file.

The unit of costs is the time that torch's dense attention takes for one score. The command measures the cost of one
score for each block size, for dense attention with a mask, and for soft caps, score terms or dropout. It also
measures the cost of a key and of a call. --check adds a table that compares the choice of "auto" with every backend and
block size.
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hf_efficient_attn.attention.select import AUTO, is_light
from hf_efficient_attn.backends import sdpa
from hf_efficient_attn.backends.blocked import execute
from hf_efficient_attn.backends.blocked.backend import NAME as BLOCKED
from hf_efficient_attn.backends.blocked.call_slices import take
from hf_efficient_attn.backends.flex import backend as flex
from hf_efficient_attn.backends.kernels import is_fused
from hf_efficient_attn.backends.machine_costs import (
    EXPLICIT_BLOCK_TOKENS,
    Costs,
    Machine,
    PassCosts,
    costs_of,
    machine_of,
    on_machine,
    path_of_measured,
    processor_of,
    remember,
)
from hf_efficient_attn.bench.cases import Call, Shape, call_of, own_call, pattern_of, repeated
from hf_efficient_attn.bench.options import (
    add_counts,
    add_device,
    add_dtype,
    add_max_seconds,
    add_results,
    add_threads,
    check_counts,
    dtype_of,
    make_folder,
    set_threads,
)
from hf_efficient_attn.bench.report import Row, describe_machine, machine_line, markdown_table, publish, resolve_device
from hf_efficient_attn.bench.timing import Case, Timing, clock_of, time_interleaved, time_within
from hf_efficient_attn.layout.block_layout import BlockCosts, BlockLayout
from hf_efficient_attn.layout.call import AttentionCall, Inputs
from hf_efficient_attn.layout.compile import compile_layout
from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.patterns.bands import Band, Dilated
from hf_efficient_attn.patterns.pattern import Pattern

BLOCK_LENGTHS = (32, 64, 96, 128, 192, 256)
BAND, TOKENS, NUM_HEADS, HEAD_DIM = Band(256, 256), 2048, 4, 64
# for the fixed time of a call: tokens of a short call, kernels of one with many kernels, and calls in one sample
FEW_TOKENS, NUM_RUNS, CALLS = 32, 8, 20
# larger than any score of the inputs, so that the cap does not change the result
SOFTCAP = 100.0
# a pass in bfloat16 is computed in float32 if this takes less than this share of the time; bfloat16 needs less memory
MOST_IF_WIDENED = 0.9
# mask, triangle, scale, dropout, log-sum-exp
NO_OPTIONS = (None, False, HEAD_DIM**-0.5, 0.0, False)
PATTERNS = ("band", "longformer", "bigbird", "dilated")
# largest number of rounds
REPEATS = 15
FORWARD, BOTH = "forward", "forward + backward"
TITLES = {
    "key": "a key that a single query attends to",
    "gathered": "copying a key and its value into place",
    "moved": "moving a query to another order and back",
    "call": "a call that is computed in blocks",
    "run": "each kernel of such a call",
    "flex": "flex: a score",
}
COUNTS = {"repeats": (10, "rounds; each runs every case once")}
DTYPES = (torch.float32, torch.bfloat16)
CHECKED_HEADS = 8
LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
# share by which the median round may exceed the fastest
MAX_DISAGREEMENT = 0.1
# fewer rounds can agree by chance
LEAST_ROUNDS = 5


class Calibration:
    """The cases of one dtype on one device, and the costs that follow from their times."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        generator = torch.Generator().manual_seed(0)
        shape = (4, 1, NUM_HEADS, TOKENS, HEAD_DIM)
        q, k, v, self.grad = torch.randn(shape, generator=generator).to(device, dtype)
        self.inputs = (q, k, v)
        self.order = torch.randperm(TOKENS, generator=generator).to(device)
        self.band = self.call(TOKENS, BAND)

    def call(self, tokens: int, pattern: Pattern, softcap: float | None = None) -> AttentionCall:
        """Return a call for the first tokens of the inputs."""
        inputs = Inputs(self.device.type, self.dtype, HEAD_DIM, HEAD_DIM, NUM_HEADS, 1)
        layout = Layout(pattern, NUM_HEADS, tokens, tokens)
        return AttentionCall(layout, inputs, softcap=softcap, scale=HEAD_DIM**-0.5)

    def measure(self, repeats: int) -> tuple[Costs, float]:
        """Return the costs from the fastest of `repeats` rounds, and by how much the rounds disagree.

        The fastest counts because other programs only slow rounds down. A single thread counts its processor time.
        """
        with on_machine(self.in_fast_dtypes(repeats)):
            cases = {**self.dense_cases(), **self.blocked_cases(), **self.other_cases()}
            timings = self.timings(cases, repeats)
            return self.costs(fastest(timings)), disagreement(timings)

    def timings(self, cases: dict[str, Case], repeats: int) -> dict[str, Timing]:
        """Return the times of cases that run in turns."""
        label = str(self.dtype).removeprefix("torch.")
        return time_interleaved(cases, repeats, self.device, description=label, clock=clock_of(self.device))

    def in_fast_dtypes(self, repeats: int) -> Machine:
        """Return this machine; it computes a bfloat16 pass in float32 if that is faster."""
        machine = machine_of(self.device.type)
        if self.dtype != torch.bfloat16 or self.device.type != "cpu":
            return machine
        cases = {}
        for dtype in (torch.bfloat16, torch.float32):
            cases[f"forward in {dtype}"] = self.forward_case(None, dtype)
            cases[f"backward in {dtype}"] = self.backward_case(None, dtype)
        times, costs = fastest(self.timings(cases, repeats)), machine.costs_in("bfloat16")

        def with_fast_dtype(name: str, known: PassCosts) -> PassCosts:
            part = times[f"{name} in {torch.float32}"] / times[f"{name} in {torch.bfloat16}"]
            is_widened = part < MOST_IF_WIDENED
            return replace(known, is_widened=is_widened)

        forward, backward = with_fast_dtype("forward", costs.forward), with_fast_dtype("backward", costs.backward)
        return replace(machine, costs=(("bfloat16", replace(costs, forward=forward, backward=backward)),))

    def costs(self, seconds: dict[str, float]) -> Costs:
        """Return the costs from the seconds of all cases."""
        score, rows = seconds["dense forward"] / (NUM_HEADS * TOKENS**2), NUM_HEADS * TOKENS
        one, many = (seconds[name] / score / CALLS for name in ("one kernel", "many kernels"))
        run = max(0.0, (many - one) / (NUM_RUNS - 1))
        flex_scores = flex.computed_pairs(self.band) if "flex" in seconds else 1
        return Costs(
            forward=self.pass_costs("forward", seconds),
            backward=self.pass_costs("backward", seconds),
            dense_backward=seconds["dense backward"] / seconds["dense forward"],
            key=max(0.0, seconds["single query"] / score / CALLS / rows - 1.0),
            gathered=seconds["gathered keys"] / score / rows,
            call=max(0.0, one - run),
            run=run,
            moved=seconds["moved queries"] / score / rows,
            flex=seconds["flex"] / score / flex_scores if "flex" in seconds else Costs.flex,
        )

    def pass_costs(self, direction: str, seconds: dict[str, float]) -> PassCosts:
        """Return the costs of a pass from the seconds of all cases."""
        dense = seconds[f"dense {direction}"] / (NUM_HEADS * TOKENS**2)

        def of(name: str, tokens: int) -> float:
            return seconds[f"{name} {direction}"] / self.blocks_of(self.band, tokens).num_pairs / dense

        explicit, masked = of("explicit", EXPLICIT_BLOCK_TOKENS), seconds[f"masked {direction}"]
        lengths = [tokens for tokens in BLOCK_LENGTHS if f"{tokens} {direction}" in seconds]
        blocks = BlockCosts(tuple((tokens, of(str(tokens), tokens)) for tokens in lengths))
        blocks = blocks if lengths else BlockCosts.only(EXPLICIT_BLOCK_TOKENS, explicit)
        known: PassCosts = getattr(costs_of(self.band), direction)
        return PassCosts(blocks, explicit, masked / seconds[f"dense {direction}"], known.is_widened)

    def blocks_of(self, call: AttentionCall, tokens: int) -> BlockLayout:
        """Return the layout of a call in blocks of `tokens` tokens."""
        return compile_layout(call.layout, BlockCosts.only(tokens), self.device)

    def dense_cases(self) -> dict[str, Case]:
        """Return the cases of dense attention."""
        mask = torch.zeros(TOKENS, TOKENS, device=self.device, dtype=self.dtype).triu_()
        return {**self.both("dense", None), **self.both("masked", mask)}

    def both(self, name: str, mask: Tensor | None) -> dict[str, Case]:
        """Return the two passes of torch's dense attention, each in the dtype that the backend sdpa uses for it."""
        dtype = costs_of(self.band).backward.fast_dtype(self.dtype, self.device.type)
        return {
            f"{name} forward": self.forward_case(mask, self.dtype),
            f"{name} backward": self.backward_case(mask, dtype),
        }

    def forward_case(self, mask: Tensor | None, dtype: torch.dtype) -> Case:
        """Return the forward pass of dense attention, computed in a dtype."""
        return case(lambda: dense(*self.inputs, mask, dtype))

    def backward_case(self, mask: Tensor | None, dtype: torch.dtype) -> Case:
        """Return the backward pass of dense attention, computed in a dtype."""
        leaves = [each.detach().requires_grad_() for each in self.inputs]
        out = dense(leaves[0], leaves[1], leaves[2], mask, dtype)
        return case(partial(torch.autograd.grad, out, leaves, self.grad, retain_graph=True))

    def blocked_cases(self) -> dict[str, Case]:
        """Return the passes of the backend blocked: by the explicit kernel, and fused in blocks of each length."""
        cases = self.passes("explicit", EXPLICIT_BLOCK_TOKENS, self.call(TOKENS, BAND, SOFTCAP))
        for tokens in BLOCK_LENGTHS if is_fused(self.band) else ():
            cases |= self.passes(str(tokens), tokens, self.band)
        return cases

    def passes(self, name: str, tokens: int, call: AttentionCall) -> dict[str, Case]:
        """Return the passes of a call in blocks of one length."""
        machine = uniform(machine_of(self.device.type), tokens)
        with on_machine(machine):
            out, lse = execute.forward(*self.inputs, call)
        saved = (self.grad, None, *self.inputs, out, lse, call)
        return {
            f"{name} forward": on(machine, case(partial(execute.forward, *self.inputs, call))),
            f"{name} backward": on(machine, case(partial(execute.backward, *saved))),
        }

    def other_cases(self) -> dict[str, Case]:
        """Return the cases of fixed times, of a single query, of copies, and of flex."""
        q, k, v = self.inputs
        residues = Dilated(NUM_RUNS, NUM_RUNS, NUM_RUNS)
        few = (q[:, :, :FEW_TOKENS], k[:, :, :FEW_TOKENS], v[:, :, :FEW_TOKENS])
        # in the dtype in which their blocks are computed
        states, *keys = (each[0] for each in costs_of(self.band).forward.in_fast_dtype(q, k, v))
        cases = {
            "one kernel": repeated(case(partial(execute.forward, *few, self.call(FEW_TOKENS, Band(1, 1)))), CALLS),
            "many kernels": repeated(case(partial(execute.forward, *few, self.call(FEW_TOKENS, residues))), CALLS),
            "single query": repeated(case(partial(sdpa.fused, q[:, :, :1], k, v, *NO_OPTIONS)), CALLS),
            "gathered keys": case(partial(gather_keys, keys, self.order)),
            "moved queries": case(partial(move_queries, states, self.order, torch.empty_like(states))),
        }
        if self.device.type == "cuda":
            cases["flex"] = case(partial(flex.attend, *self.inputs, self.band, False))
        return cases


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the output of torch's dense attention, computed in `dtype`, in the dtype of the inputs."""
    states = [each.to(dtype) for each in (q, k, v)]
    mask = None if mask is None else mask.to(dtype)
    return scaled_dot_product_attention(states[0], states[1], states[2], attn_mask=mask).to(q.dtype)


def gather_keys(keys: Sequence[Tensor], order: Tensor) -> None:
    """Copy all keys and values in another order."""
    for tensor in keys:
        take(tensor, order, torch.empty_like(tensor))


def move_queries(states: Tensor, order: Tensor, back: Tensor) -> None:
    """Move all queries and the results of their rows to another order, and the results back."""
    for tensor in (states, states):
        moved = tensor[:, order]
    back.index_copy_(1, order, moved)


def fastest(timings: Mapping[str, Timing]) -> dict[str, float]:
    """Return the seconds of the fastest round of each case."""
    return {name: min(timing.seconds) for name, timing in timings.items()}


def disagreement(timings: Mapping[str, Timing]) -> float:
    """Return the share by which the median round exceeds the fastest one, as the median of all cases.

    >>> disagreement({"one": Timing((1.0, 1.1, 2.0)), "other": Timing((2.0, 2.0, 2.0)), "third": Timing((1.0, 1.5))})
    0.10000000000000009
    """
    return median(timing.median / min(timing.seconds) - 1 for timing in timings.values())


def uniform(machine: Machine, tokens: int) -> Machine:
    """Return a machine on which blocks of one length are always the cheapest."""
    blocks = BlockCosts.only(tokens)

    def of(costs: Costs) -> Costs:
        forward, backward = (replace(each, blocks=blocks) for each in (costs.forward, costs.backward))
        return replace(costs, forward=forward, backward=backward)

    return replace(machine, costs=tuple((name, of(costs)) for name, costs in machine.costs))


def case(run: Callable[[], object]) -> Case:
    """Return the case of a function."""
    return Case(lambda _: run())


def on(machine: Machine, plain: Case) -> Case:
    """Return a case that is computed with the costs of `machine`."""

    def run(state: object) -> None:
        with on_machine(machine):
            plain.run(state)

    return Case(run, plain.prepare)


def check(
    patterns: list[str], lengths: list[int], shape: Shape, seconds: float, all_seconds: float | None = None
) -> list[Row]:
    """Return a row per pattern, length and measure: the time of "auto" over that of the fastest way.

    Args:
        seconds: time of the rounds of each row.
        all_seconds: time after which no further row is measured, except for the first two; None: no limit.
    """
    device, start = torch.device(shape.device), time.perf_counter()
    rows: list[Row] = []
    for tokens in lengths:
        for name in patterns:
            for measure in (FORWARD, BOTH):
                if len(rows) > 1 and all_seconds is not None and time.perf_counter() - start > all_seconds:
                    return rows
                cases = contestants(name, tokens, measure, shape)
                timings = time_within(cases, REPEATS, seconds, f"{tokens:,} tokens", device, clock_of(device))
                # the fastest round counts, because other programs slow some rounds down
                times = {way: 1000 * min(timing.seconds) for way, timing in timings.items()}
                fastest = min(times, key=times.__getitem__)
                over = times[AUTO] / times[fastest]
                rows.append({"pattern": name, "tokens": tokens, "measure": measure, "over_fastest": over})
                rows[-1] |= {"fastest": fastest, "milliseconds": times}
    return rows


def contestants(name: str, tokens: int, measure: str, shape: Shape) -> dict[str, Case]:
    """Return "auto", dense attention with a mask if it takes little memory, and blocks of every length."""
    inputs, pattern = shape.tensors(tokens), pattern_of(name, tokens)
    target = torch.ones_like(inputs[0])

    def case_of(call: Call) -> Case:
        return call.forward_case() if measure == FORWARD else call.forward_backward_case(target)

    cases = {AUTO: case_of(own_call(pattern, inputs, AUTO))}
    if is_light(call_of(Layout(pattern, shape.num_heads, tokens, tokens), shape), sdpa.NAME, (BLOCKED,)):
        cases[sdpa.NAME] = case_of(own_call(pattern, inputs, sdpa.NAME))
    machine = machine_of(shape.device)
    for length in BLOCK_LENGTHS:
        way = case_of(own_call(pattern, inputs, BLOCKED))
        cases[f"blocks of {length}"] = on(uniform(machine, length), way)
    return cases


def results_markdown(results: dict[str, Any]) -> str:
    """Return all tables, and one line on where the costs are kept."""
    parts = [f"# What attention costs: {results['calibration']['processor']['name']}", machine_line(results["machine"])]
    for heading, table in sections(results).items():
        parts += [f"## {heading}", table]
    if results["kept"] is None:
        reason = ""
        if results.get("rounds", 0) < results.get("least_rounds", 0):
            reason = f" {results['rounds']} rounds (--repeats) are too few; give at least {results['least_rounds']}."
        elif results.get("disagreement", 0) > results.get("most_disagreement", 0):
            reason = (
                f" The median round took {results['disagreement']:.0%} longer than the fastest, and at most "
                f"{results['most_disagreement']:.0%} is allowed: other programs are running. Measure on an idle machine"
                f"{', or with --threads 1' if results['machine']['torch_threads'] > 1 else ''}."
            )
        return "\n\n".join([*parts, f"Nothing was kept. The costs in use are still those {results['before']}.{reason}"])
    kept = f"Kept in {results['kept']}, and used on this machine from now on, instead of those {results['before']}."
    return "\n\n".join([*parts, kept])


def sections(results: dict[str, Any]) -> dict[str, str]:
    """Return the tables by their headings."""
    found = {"Costs (1 = a score of dense attention without a mask)": costs_table(results["calibration"]["costs"])}
    for measure in (FORWARD, BOTH) if "check" in results else ():
        rows = [row for row in results["check"] if row["measure"] == measure]
        found[f'Time of "auto" divided by the fastest time, {measure}'] = check_table(rows)
    return found


def costs_table(costs: dict[str, Any]) -> str:
    """Return a row per cost, a column per dtype."""
    rows = []
    for direction in ("forward", "backward"):
        passes = {dtype: each[direction] for dtype, each in costs.items()}
        listed = {dtype: dict(each["blocks"]["per_score"]) for dtype, each in passes.items()}
        lengths = sorted({tokens for each in listed.values() for tokens in each})
        rows += [
            [f"{direction}: a score in blocks of {tokens}", *(_figure(each.get(tokens)) for each in listed.values())]
            for tokens in lengths
        ]
        if any(each.get("is_widened") for each in passes.values()):
            computed = ["float32" if each["is_widened"] else dtype for dtype, each in passes.items()]
            rows.append([f"{direction}: computed in", *computed])
        rows += [[f"{direction}: a score with a mask", *(_figure(each["masked"]) for each in passes.values())]]
        rows += [
            [
                f"{direction}: a score with caps, terms or dropout",
                *(_figure(each["explicit"]) for each in passes.values()),
            ]
        ]
    rows += [["dense attention: backward / forward", *(_figure(each["dense_backward"]) for each in costs.values())]]
    rows += [[title, *(_figure(each[name]) for each in costs.values())] for name, title in TITLES.items()]
    return markdown_table(["cost", *costs], rows)


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def check_table(rows: list[Row]) -> str:
    """Return a row per pattern, a column per length; a cell that is more than 5% off also names the fastest way."""
    cells = {(row["pattern"], row["tokens"]): _choice(row) for row in rows}
    patterns, lengths = (list(dict.fromkeys(part)) for part in zip(*cells, strict=True))
    return markdown_table(
        ["pattern", *(f"{tokens:,}" for tokens in lengths)],
        # what was not measured before the time limit has no value
        [[name, *(cells.get((name, tokens), "–") for tokens in lengths)] for name in patterns],
    )


def _choice(row: Row) -> str:
    over = f"{row['over_fastest']:.2f}"
    return over if row["over_fastest"] <= 1.05 else f"{over} ({row['fastest']})"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `bench calibrate`."""
    add_counts(parser, COUNTS)
    add_device(parser)
    add_threads(parser)
    parser.add_argument("--show-only", action="store_true", help="print the costs without keeping them")
    parser.add_argument(
        "--check", action="store_true", help="also compare the choice of auto with every backend and block size"
    )
    parser.add_argument(
        "--lengths",
        nargs="+",
        type=int,
        default=LENGTHS,
        metavar="N",
        help=f"lengths that --check compares, in tokens (default {LENGTHS[0]}, doubled up to {LENGTHS[-1]})",
    )
    parser.add_argument(
        "--patterns",
        nargs="+",
        default=PATTERNS,
        metavar="P",
        help=f"patterns that --check compares, as in bench attention (default {' '.join(PATTERNS)})",
    )
    add_dtype(parser, "what --check compares")
    add_max_seconds(parser, 4.0)
    parser.add_argument(
        "--max-minutes",
        type=float,
        metavar="M",
        help="stop --check after this number of minutes and show the comparisons made so far (default: no limit)",
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
            shape = Shape(1, CHECKED_HEADS, HEAD_DIM, dtype_of(args, device), device.type)
            limits = (args.max_seconds, None if args.max_minutes is None else 60 * args.max_minutes)
            results["check"] = check(args.patterns, sorted(set(args.lengths)), shape, *limits)
    publish(args, "calibrate", results, results_markdown(results))


def measured(device: torch.device, repeats: int) -> tuple[Machine, float]:
    """Measure the costs of this machine; return the machine with them, and by how much the rounds disagree."""
    machine = describe_machine(device)
    source = f"measured on {machine['date'][:10]} with torch {machine['torch']}, {machine['torch_threads']} threads"
    found = {str(dtype).removeprefix("torch."): Calibration(device, dtype).measure(repeats) for dtype in DTYPES}
    costs = tuple((name, each) for name, (each, _) in found.items())
    return Machine(processor_of(device.type), source, costs), max(differs for _, differs in found.values())
