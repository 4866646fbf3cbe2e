"""Show where the time of attention goes: `hf-efficient-attn bench attention --profile`.

The useful-pair efficiency of a call is the product of these factors and a residual:

- block granularity: allowed pairs over computed ones;
- kernel speed: scores per second of the same kernel calls alone, over those of dense attention;
- kernel in place: the time of the kernel calls alone over their time within the call, in which data has left the caches
  and a compiled kernel evaluates masks;
- kernel share: time of the kernel calls over the whole time; the rest is copies, joins and dispatch.

Times within a call are those of torch.profiler; times alone are those of a repeat right after each kernel call.
"""

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from hf_efficient_attn.attention.explain_call import allowed_pairs
from hf_efficient_attn.attention.select import select
from hf_efficient_attn.backends.blocked import backend as blocked
from hf_efficient_attn.backends.blocked import execute
from hf_efficient_attn.backends.flex import backend as flex
from hf_efficient_attn.backends.machine_costs import machine_of
from hf_efficient_attn.bench.cases import Call, Shape, call_of, clear_caches, dense_call, own_call, pattern_of, repeated
from hf_efficient_attn.bench.report import Row, describe_machine, machine_line, markdown_table
from hf_efficient_attn.bench.timing import LEAST_ROUNDS, Case, time_once
from hf_efficient_attn.layout.call import AttentionCall, inputs_of
from hf_efficient_attn.layout.compile import compile_layout
from hf_efficient_attn.layout.layout import Layout

CPU = torch.device("cpu")
FORWARD_KERNEL = "aten::_scaled_dot_product_flash_attention_for_cpu"
BACKWARD_KERNEL = f"{FORWARD_KERNEL}_backward"
COMPILED_KERNEL = "## Call CompiledFxGraph"
KERNELS = {FORWARD_KERNEL: "kernel, forward", BACKWARD_KERNEL: "kernel, backward", COMPILED_KERNEL: "kernel, forward"}
# purposes of torch's operators other than kernels; all other operators, and time outside operators, are dispatch
PURPOSES = {
    "gathers and copies": ("index_select", "index", "copy_", "clone", "index_copy_", "arange", "mul", "add"),
    "joins by log-sum-exp": ("lerp_", "logaddexp", "sigmoid", "sub", "nan_to_num", "nan_to_num_"),
    "sums of gradients": ("add_", "sum", "index_add_"),
    "filling outputs": ("fill_", "zero_"),
    "masks": ("masked_fill", "masked_fill_", "bitwise_not", "eq", "all", "expand"),
}
DISPATCH = "Python, views, allocation"
# dense attention is timed up to this number of tokens; its time per pair is taken from there for longer calls
DENSE_TOKENS = 4096
LAYOUTS = (("bigbird", 131072), ("band", 131072))
# figures for which each call is compared with the next
COMPARED = ("time", "growth")
GRANULARITY = "block granularity"
MEANINGS = {
    GRANULARITY: "scores computed that the pattern does not allow",
    "kernel speed": "the kernel is slower per score on these blocks than on the rows of dense attention",
    "kernel in place": "the kernel is slower within the call than alone (cold data, or masks evaluated in the kernel)",
    "kernel share": "time outside the kernel",
}
TITLES = {"forward": "forward", "forward_backward": "forward + backward"}


@dataclass(frozen=True)
class ProfileCase:
    """A call whose time is broken down.

    Attributes:
        figure: what is reported: "efficiency"; "speed" compared with dense attention; "time" compared with the
            previous case; "growth" per doubling.
        aligned: a pattern of whole blocks with about the same number of pairs, with which a kernel that evaluates masks
            is timed without them; None: the kernel is timed alone.
    """

    pattern: str
    tokens: int
    backend: str = "auto"
    measure: str = "forward"
    figure: str = "efficiency"
    aligned: str | None = None


CASES = (
    *(ProfileCase("band", tokens, flex.NAME, aligned="blocks(band(4, 4), 64)") for tokens in (4096, 32768)),
    *(ProfileCase("bigbird", tokens) for tokens in (4096, 16384)),
    *(ProfileCase(name, 4096, figure="time") for name in ("band", "dilated")),
    *(ProfileCase(name, tokens, figure="speed") for name, tokens in (("band", 128), ("band", 512), ("dilated", 128))),
    *(ProfileCase("band", tokens, measure="forward_backward", figure="growth") for tokens in (65536, 131072)),
)


def as_case(call: Call, measure: str) -> Case:
    """Return the case of a forward pass, or of forward and backward."""
    if measure == "forward":
        return call.forward_case()
    return call.forward_backward_case(torch.ones_like(call.inputs[0]))


def kernels_of(case: ProfileCase, shape: Shape, layout: Layout, inputs: list[Tensor], backend: str) -> list[Row]:
    """Return the kernel calls of one call, timed alone."""
    if backend == flex.NAME:
        return [aligned_kernel(case, shape, layout)]
    return kernels_alone(lambda: run_open(case, layout, inputs, backend))


def run_open(case: ProfileCase, layout: Layout, inputs: list[Tensor], backend: str) -> None:
    """Run a call without custom operators, which would hide its kernels from a dispatch mode."""
    if backend != blocked.NAME:
        as_case(own_call(layout.pattern, inputs, backend), case.measure).run(None)
        return
    q, k, v = (tensor.detach() for tensor in inputs)
    call = AttentionCall(layout, inputs_of(q, k, v), scale=q.shape[-1] ** -0.5)
    out, lse = execute.forward(q, k, v, call)
    if case.measure != "forward":
        execute.backward(torch.ones_like(out), None, q, k, v, out, lse, call)


class RepeatKernels(TorchDispatchMode):
    """A dispatch mode that repeats every call of the fused kernel, and records its shape and the repeat's time."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[int, int, int, int], float]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = KERNELS.get(func.name())
        if name is not None:
            q, k = args[:2] if func.name() == FORWARD_KERNEL else args[1:3]
            start = time.perf_counter()
            func(*args, **(kwargs or {}))
            seconds = time.perf_counter() - start
            self.calls.append((name.split()[-1], (q.shape[0], q.shape[1], q.shape[2], k.shape[2]), seconds))
        return result


def kernels_alone(run: Callable[[], None]) -> list[Row]:
    """Return the calls of the fused kernel in `run`; calls with equal direction, queries and keys are added up."""
    with RepeatKernels() as mode:
        run()
    grouped: dict[tuple[str, int, int], Row] = {}
    for direction, (heads, blocks, queries, keys), seconds in mode.calls:
        new = {"direction": direction, "queries": queries, "keys": keys, "calls": 0, "pairs": 0, "seconds": 0.0}
        kernel = grouped.setdefault((direction, queries, keys), new)
        kernel["calls"] += 1
        kernel["pairs"] += heads * blocks * queries * keys
        kernel["seconds"] += seconds
    return sorted(grouped.values(), key=lambda kernel: -kernel["seconds"])


def aligned_kernel(case: ProfileCase, shape: Shape, layout: Layout) -> Row:
    """Return the compiled kernel of flex; its time is computed from that per pair of a pattern of whole blocks."""
    pattern = pattern_of(case.aligned or case.pattern, case.tokens)
    call = own_call(pattern, shape.tensors(case.tokens), flex.NAME)
    # the first call compiles
    _, aligned_seconds = (time_once(call.forward_case(), CPU) for _ in range(2))
    aligned = Layout(pattern, shape.num_heads, case.tokens, case.tokens)
    pairs, aligned_pairs = (flex.computed_pairs(call_of(one, shape)) for one in (layout, aligned))
    queries, keys = flex.BLOCK_SIZES[shape.device]
    seconds = aligned_seconds * pairs / aligned_pairs
    pairs *= shape.batch_size
    return {"direction": "forward", "queries": queries, "keys": keys, "calls": 1, "pairs": pairs, "seconds": seconds}


PURPOSE_OF = {f"aten::{name}": purpose for purpose, names in PURPOSES.items() for name in names}


def profile_calls(shape: Shape, repeats: int, max_seconds: float) -> dict[str, Any]:
    """Return the profiles of `CASES` and `LAYOUTS`, in JSON types."""
    return {
        "machine": describe_machine(CPU),
        "settings": {**asdict(shape), "repeats": repeats, "max_seconds": max_seconds},
        "cases": [profile_case(case, shape, repeats, max_seconds) for case in CASES],
        "layouts": [profile_layout(name, tokens, shape) for name, tokens in LAYOUTS],
        "dense_tokens": DENSE_TOKENS,
    }


def profile_case(case: ProfileCase, shape: Shape, repeats: int, max_seconds: float) -> Row:
    """Return the time of a call by purpose, its kernel calls, and the factors of its efficiency.

    Each is the minimum of up to `repeats` rounds that fit into `max_seconds`, at least `LEAST_ROUNDS`.
    """
    inputs = shape.tensors(case.tokens)
    pattern = pattern_of(case.pattern, case.tokens)
    layout = Layout(pattern, shape.num_heads, case.tokens, case.tokens)
    backend = select(call_of(layout, shape), case.backend).NAME
    call = own_call(pattern, inputs, case.backend)
    dense = dense_call(shape.tensors(min(case.tokens, DENSE_TOKENS)))
    kernels = partial(kernels_of, case, shape, layout, inputs, backend)
    rounds: list[Round] = []
    start = time.perf_counter()
    while len(rounds) < min(repeats, LEAST_ROUNDS) or (
        len(rounds) < repeats and time.perf_counter() - start < max_seconds
    ):
        rounds.append(Round(measured_seconds(case, call, dense), profiled(case, call), kernels()))
    found = describe(least_of(rounds), case, shape, layout)
    return {**asdict(case), "computed_by": backend, "rounds": len(rounds), **found}


@dataclass(frozen=True)
class Round:
    """The times of one round, in seconds per call: whole calls, parts by purpose, and kernel calls alone."""

    calls: dict[str, float]
    purposes: dict[str, float]
    kernels: list[Row]


def least_of(rounds: list[Round]) -> Round:
    """Return the minimum of every measurement, which other programs have disturbed least."""
    calls = {name: min(one.calls[name] for one in rounds) for name in rounds[0].calls}
    purposes = min((one.purposes for one in rounds), key=lambda purposes: sum(purposes.values()))
    kernels = min((one.kernels for one in rounds), key=lambda kernels: sum(kernel["seconds"] for kernel in kernels))
    return Round(calls, purposes, kernels)


def describe(best: Round, case: ProfileCase, shape: Shape, layout: Layout) -> Row:
    """Return the results of a case in JSON types."""
    dense_tokens = min(case.tokens, DENSE_TOKENS)
    dense_rates = rates(best.calls, shape, dense_tokens, case.measure)
    pairs = shape.batch_size * allowed_pairs(layout)
    ideal = sum(pairs / rate for rate in dense_rates.values())
    return {
        "allowed_pairs": pairs,
        "milliseconds": 1000 * best.calls["own"],
        "efficiency": ideal / best.calls["own"],
        "speed": best.calls["dense"] / best.calls["own"] * (case.tokens / dense_tokens) ** 2,
        "purposes": {name: 1000 * value for name, value in best.purposes.items()},
        "kernels": [describe_kernel(kernel, dense_rates) for kernel in best.kernels],
        **factors(best, ideal, dense_rates),
    }


def calls_per_sample(tokens: int) -> int:
    """Return how many calls are timed at once: several if they are short."""
    return max(1, DENSE_TOKENS // tokens)


def measured_seconds(case: ProfileCase, call: Call, dense: Call) -> dict[str, float]:
    """Return the seconds of one call: "own", "dense", and "dense forward"."""
    calls = calls_per_sample(case.tokens)
    cases = {"own": as_case(call, case.measure), "dense": as_case(dense, case.measure)}
    cases["dense forward"] = dense.forward_case()
    return {name: time_once(repeated(one, calls), CPU) / calls for name, one in cases.items()}


def rates(seconds: dict[str, float], shape: Shape, tokens: int, measure: str) -> dict[str, float]:
    """Return dense attention's pairs per second, forward and, if it was timed, backward."""
    pairs = shape.batch_size * shape.num_heads * tokens**2
    found = {"forward": pairs / seconds["dense forward"]}
    if measure != "forward":
        found["backward"] = pairs / (seconds["dense"] - seconds["dense forward"])
    return found


def profiled(case: ProfileCase, call: Call) -> dict[str, float]:
    """Return the seconds of one call by purpose, as torch.profiler sees them."""
    calls = calls_per_sample(case.tokens)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        total = time_once(repeated(as_case(call, case.measure), calls), CPU)
    seconds: dict[str, float] = defaultdict(float)
    for event in profiler.key_averages():
        name = COMPILED_KERNEL if event.key.startswith(COMPILED_KERNEL) else event.key
        purpose = KERNELS.get(name) or PURPOSE_OF.get(name)
        if purpose is not None:
            seconds[purpose] += event.self_cpu_time_total * 1e-6
    seconds[DISPATCH] = max(0.0, total - sum(seconds.values()))
    return {name: value / calls for name, value in seconds.items() if value > 0.0}


def describe_kernel(kernel: Row, dense_rates: dict[str, float]) -> Row:
    """Return a kernel with its speed: scores per second over those of dense attention in the same direction."""
    seconds = kernel["seconds"]
    own = {name: value for name, value in kernel.items() if name != "seconds"}
    return {
        **own,
        "milliseconds": 1000 * seconds,
        "speed": kernel["pairs"] / seconds / dense_rates[kernel["direction"]],
    }


def factors(best: Round, ideal: float, dense_rates: dict[str, float]) -> dict[str, Any]:
    """Return the factors of an efficiency, and the residual: the efficiency over the product of the factors.

    Args:
        ideal: seconds that dense attention would take for the allowed pairs.
    """
    alone = sum(kernel["seconds"] for kernel in best.kernels)
    computed = sum(kernel["pairs"] / dense_rates[kernel["direction"]] for kernel in best.kernels)
    in_place = sum(best.purposes.get(name, 0.0) for name in set(KERNELS.values()))
    found = {
        GRANULARITY: ideal / computed,
        "kernel speed": computed / alone,
        "kernel in place": alone / in_place,
        "kernel share": in_place / sum(best.purposes.values()),
    }
    return {"factors": found, "residual": ideal / best.calls["own"] / prod(found.values())}


def _ignoring_state(run: Callable[[], object], _: object) -> object:
    return run()


def profile_layout(name: str, tokens: int, shape: Shape) -> Row:
    """Return the milliseconds to build the layout of a forward pass with empty caches, to find it again, and to run it.

    Each is the minimum of `LEAST_ROUNDS` rounds.
    """
    layout = Layout(pattern_of(name, tokens), shape.num_heads, tokens, tokens)
    call = own_call(layout.pattern, shape.tensors(tokens), blocked.NAME)
    cut = partial(compile_layout, layout, machine_of(CPU.type).costs_in(shape.dtype).forward.blocks, CPU)
    steps: dict[str, Callable[[], object]] = {
        "drawing random blocks": layout.head_groups,
        "cutting into runs": cut,
        "finding it again": cut,
        "forward pass": call.run_forward,
    }
    rounds = []
    for _ in range(LEAST_ROUNDS):
        clear_caches()
        rounds.append({step: 1000 * time_once(Case(partial(_ignoring_state, run)), CPU) for step, run in steps.items()})
    least = {step: min(one[step] for one in rounds) for step in steps}
    return {"pattern": name, "tokens": tokens, "milliseconds": least}


def profile_markdown(results: dict[str, Any]) -> str:
    """Return all sections as Markdown."""
    settings = results["settings"]
    shape = f"{settings['batch_size']} × {settings['num_heads']} heads of {settings['head_dim']}, {settings['dtype']}"
    parts = [f"# Where the time of attention goes: {shape}", machine_line(results["machine"]), legend(results)]
    for case in results["cases"]:
        parts += case_section(case)
    for figure in COMPARED:
        for first, second in pairwise(case for case in results["cases"] if case["figure"] == figure):
            parts += comparison_section(first, second)
    for layout in results["layouts"]:
        parts += layout_section(layout)
    return "\n\n".join(parts)


def legend(results: dict[str, Any]) -> str:
    """Return what the numbers mean."""
    threads = results["machine"]["torch_threads"]
    return (
        f"`hf-efficient-attn bench attention --profile` with {threads} thread{'s' if threads > 1 else ''} "
        "(`OMP_NUM_THREADS`). Other programs on the machine change the ratios, less with one thread than with several, "
        "so they differ from those of the benchmark. A round times the call, dense attention, the call under "
        "torch.profiler, and its kernel calls alone; each number is the smallest of all rounds. Factors: block "
        "granularity = allowed pairs / computed pairs; kernel speed = scores per second of the kernel calls alone / "
        "those of dense attention; kernel in place = time of the kernel calls alone / their time within the call; "
        "kernel share = time of the kernel calls / time of the call. The product of the factors is the efficiency, "
        "except for the residual, which is noise and the cost of profiling. Alone: each kernel call is repeated at "
        "once, with its data still in the caches; flex is one kernel call, so its time alone is the time per score of "
        "a pattern of whole blocks, for which no mask is evaluated. Dense attention is extrapolated beyond "
        f"{results['dense_tokens']:,} tokens, in proportion to the number of pairs."
    )


def case_section(case: Row) -> list[str]:
    """Return heading, sentence and tables of one call."""
    heading = f"## {case['pattern']}, {case['backend']}, {case['tokens']:,} tokens, {TITLES[case['measure']]}"
    kernels = [
        [
            f"{kernel['direction']}, {kernel['queries']:,} × {kernel['keys']:,}",
            f"{kernel['calls']:,}",
            f"{kernel['pairs']:,}",
            f"{kernel['milliseconds']:.3g}",
            f"{kernel['speed']:.2f}",
        ]
        for kernel in case["kernels"]
    ]
    kernel_table = markdown_table(
        ["kernel, queries × keys of a block", "calls", "pairs", "ms alone", "speed per pair against dense"], kernels
    )
    return [heading, limit_sentence(case), factor_table(case), kernel_table, purpose_table(case)]


def limit_sentence(case: Row) -> str:
    """Return what was reached, and the largest loss: what it is and what the figure would be without it."""
    losses = losses_of(case)
    name = min(losses, key=lambda key: losses[key])
    text = f"Computed by {case['computed_by']} in {case['milliseconds']:.3g} ms: {figure_of(case)}"
    better = case["speed" if case["figure"] == "speed" else "efficiency"] / losses[name]
    unit = f"{better:.2f} times as fast as dense" if case["figure"] == "speed" else f"{better:.0%}"
    text += f". The largest loss is {name} (× {losses[name]:.2f}; {unit} without it): {MEANINGS[name]}"
    if name == "kernel share":
        others = {purpose: value for purpose, value in case["purposes"].items() if not purpose.startswith("kernel")}
        text += f", most of it {max(others, key=lambda key: others[key])}"
    return f"{text}."


def losses_of(case: Row) -> dict[str, float]:
    """Return the factors that count as losses; not the granularity of dense attention, which computes all pairs."""
    return {
        name: factor for name, factor in case["factors"].items() if case["figure"] != "speed" or name != GRANULARITY
    }


def figure_of(case: Row) -> str:
    """Return the speed or the efficiency of a call, as text."""
    if case["figure"] == "speed":
        return f"{case['speed']:.2f} times the speed of dense attention"
    return f"{case['efficiency']:.0%} useful-pair efficiency"


def factor_table(case: Row) -> str:
    """Return the factors, the residual and the efficiency, which is their product."""
    named = {**case["factors"], "residual": case["residual"], "= efficiency": case["efficiency"]}
    return markdown_table(["factor", *named], [["", *(f"{value:.3f}" for value in named.values())]])


def purpose_table(case: Row) -> str:
    """Return the profiled time by purpose, largest first."""
    total = sum(case["purposes"].values())
    ordered = sorted(case["purposes"].items(), key=lambda item: -item[1])
    lines = [[name, f"{value:.3g}", f"{value / total:.1%}"] for name, value in ordered]
    return markdown_table(["where", "ms", "share"], lines)


def comparison_section(first: Row, second: Row) -> list[str]:
    """Return how much longer every part takes in the second of two calls: at another length, or of another pattern."""
    ratio = second["milliseconds"] / first["milliseconds"]
    expected = second["tokens"] / first["tokens"]
    parts = [(name, first["purposes"].get(name, 0.0), time) for name, time in second["purposes"].items()]
    added = {name: after - expected * before for name, before, after in parts}
    lines = [
        [name, f"{before:,.3g}", f"{after:,.3g}", f"{after / before:.2f}" if before else "–"]
        for name, before, after in parts
    ]
    title = TITLES[second["measure"]]
    if first["pattern"] == second["pattern"]:
        heading = f"Growth from {first['tokens']:,} to {second['tokens']:,} tokens: {first['pattern']}, "
        heading += f"{second['backend']}, {title}"
        names = [f"{case['tokens']:,}" for case in (first, second)]
    else:
        names = [first["pattern"], second["pattern"]]
        heading = f"{names[1]} against {names[0]}: {second['backend']}, {second['tokens']:,} tokens, {title}"
    return [
        f"## {heading}",
        f"{ratio:.2f} times the time. {added_most(added, expected)}",
        markdown_table(["part", *(f"ms, {name}" for name in names), "×"], lines),
    ]


def added_most(added: dict[str, float], expected: float) -> str:
    """Return which part takes most milliseconds beyond the expected multiple of its time in the first call.

    >>> added_most({"masks": 1.5, "kernel, forward": -3.0}, 2.0)
    'In the profiled runs, the part that adds most beyond 2 × the first call is masks: +1.5 ms.'
    """
    most = max(added, key=lambda name: added[name])
    if added[most] <= 0.0:
        return f"In the profiled runs, no part takes more than {expected:g} × its time in the first call."
    return (
        f"In the profiled runs, the part that adds most beyond {expected:g} × the first call is {most}: "
        f"{added[most]:+,.3g} ms."
    )


def layout_section(layout: Row) -> list[str]:
    """Return the cost of building a layout, compared with the forward pass that it is first built for."""
    steps = dict(layout["milliseconds"])
    forward = steps.pop("forward pass")
    again = steps.pop("finding it again")
    share = sum(steps.values()) / forward
    most = max(steps, key=lambda name: steps[name])
    lines = [[name, f"{value:,.3g}", f"{value / forward:.2%}"] for name, value in layout["milliseconds"].items()]
    return [
        f"## Building the layout: {layout['pattern']}, {layout['tokens']:,} tokens",
        f"Building the layout takes {share:.1%} of a forward pass, once per length; most of it is {most}. Later calls "
        f"find the layout in {again:.2g} ms.",
        markdown_table(["step", "ms", "of a forward pass"], lines),
    ]
