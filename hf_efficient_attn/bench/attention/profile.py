"""Where the time of attention goes: `hf-efficient-attn bench attention --profile`.

The useful-pair efficiency of a call is taken apart into factors, whose product it is but for a residual:

- block granularity: allowed pairs over computed ones;
- kernel speed: scores per second of the same kernel calls alone, over those of dense attention;
- kernel in place: their time alone over that within the call, which has data that left the caches and, in a compiled
  kernel, masks to evaluate;
- kernel share: of the whole time; the rest are copies, joins and dispatch.

Times within a call are those of torch.profiler, alone those of a repeat right behind each kernel call.
"""

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from math import prod
from typing import Any

from torch.profiler import ProfilerActivity, profile

from hf_efficient_attn.attention.explained_call import allowed_pairs
from hf_efficient_attn.attention.select import select
from hf_efficient_attn.backends.blocked import backend as blocked
from hf_efficient_attn.backends.machine_costs import machine_of
from hf_efficient_attn.bench.attention.cases import (
    Call,
    Shape,
    clear_caches,
    dense_call,
    own_call,
    pattern_of,
    repeated,
)
from hf_efficient_attn.bench.attention.measure import Row, call_of
from hf_efficient_attn.bench.attention.profile_cases import CASES, ProfileCase, as_case
from hf_efficient_attn.bench.attention.profile_kernels import COMPILED_KERNEL, CPU, KERNELS, kernels_of
from hf_efficient_attn.bench.harness.report import describe_machine
from hf_efficient_attn.bench.harness.steps import step_case
from hf_efficient_attn.bench.harness.timing import LEAST_ROUNDS, time_once
from hf_efficient_attn.layout.blocks.compile import compile_layout
from hf_efficient_attn.layout.layout import Layout

# what the operators of torch beside the kernels are there for; all others, and what no operator has, is dispatch
PURPOSES = {
    "gathers and copies": ("index_select", "index", "copy_", "clone", "index_copy_", "arange", "mul", "add"),
    "joins by log-sum-exp": ("lerp_", "logaddexp", "sigmoid", "sub", "nan_to_num", "nan_to_num_"),
    "sums of gradients": ("add_", "sum", "index_add_"),
    "filling outputs": ("fill_", "zero_"),
    "masks": ("masked_fill", "masked_fill_", "bitwise_not", "eq", "all", "expand"),
}
PURPOSE_OF = {f"aten::{name}": purpose for purpose, names in PURPOSES.items() for name in names}
DISPATCH = "Python, views, allocation"
# dense attention is timed up to so many tokens; beyond, its time per pair is taken from there
DENSE_TOKENS = 4096
LAYOUTS = (("bigbird", 131072), ("band", 131072))
LAYOUT_TARGET = 0.02


def profile_calls(shape: Shape, repeats: int, max_seconds: float) -> dict[str, Any]:
    """Return the profiles of `CASES` and `LAYOUTS`, in JSON types."""
    return {
        "machine": describe_machine(CPU),
        "settings": {**asdict(shape), "repeats": repeats, "max_seconds": max_seconds},
        "cases": [profile_case(case, shape, repeats, max_seconds) for case in CASES],
        "layouts": [profile_layout(name, tokens, shape) for name, tokens in LAYOUTS],
        "layout_target": LAYOUT_TARGET,
        "dense_tokens": DENSE_TOKENS,
    }


def profile_case(case: ProfileCase, shape: Shape, repeats: int, max_seconds: float) -> Row:
    """Return the time of a call by purpose, its kernel calls, and the factors of its efficiency.

    Each is the least of up to `repeats` rounds and of `max_seconds`, at least `LEAST_ROUNDS`.
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
    """What one round found, all in seconds of one call: whole calls, parts by purpose, and kernel calls alone."""

    calls: dict[str, float]
    purposes: dict[str, float]
    kernels: list[Row]


def least_of(rounds: list[Round]) -> Round:
    """Return the least of every measurement, which other work on the machine has disturbed least."""
    calls = {name: min(one.calls[name] for one in rounds) for name in rounds[0].calls}
    purposes = min((one.purposes for one in rounds), key=lambda purposes: sum(purposes.values()))
    kernels = min((one.kernels for one in rounds), key=lambda kernels: sum(kernel["seconds"] for kernel in kernels))
    return Round(calls, purposes, kernels)


def describe(best: Round, case: ProfileCase, shape: Shape, layout: Layout) -> Row:
    """Return what was found in JSON types."""
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
    """Return how many calls are timed at once: several of short ones."""
    return max(1, DENSE_TOKENS // tokens)


def measured_seconds(case: ProfileCase, call: Call, dense: Call) -> dict[str, float]:
    """Return the seconds of one call: "own", "dense", and "dense forward"."""
    calls = calls_per_sample(case.tokens)
    cases = {"own": as_case(call, case.measure), "dense": as_case(dense, case.measure)}
    cases["dense forward"] = dense.forward_case()
    return {name: time_once(repeated(one, calls), CPU) / calls for name, one in cases.items()}


def rates(seconds: dict[str, float], shape: Shape, tokens: int, measure: str) -> dict[str, float]:
    """Return dense attention's pairs per second, forward and, where it was timed, backward."""
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
    """Return the factors of an efficiency, and the residual that is left between their product and the efficiency.

    Args:
        ideal: seconds that dense attention would take for the allowed pairs.
    """
    alone = sum(kernel["seconds"] for kernel in best.kernels)
    computed = sum(kernel["pairs"] / dense_rates[kernel["direction"]] for kernel in best.kernels)
    in_place = sum(best.purposes.get(name, 0.0) for name in set(KERNELS.values()))
    found = {
        "block granularity": ideal / computed,
        "kernel speed": computed / alone,
        "kernel in place": alone / in_place,
        "kernel share": in_place / sum(best.purposes.values()),
    }
    return {"factors": found, "residual": ideal / best.calls["own"] / prod(found.values())}


def profile_layout(name: str, tokens: int, shape: Shape) -> Row:
    """Return the milliseconds of building the layout of a forward pass from nothing, of finding it, and of the pass.

    Each is the least of `LEAST_ROUNDS`.
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
        rounds.append({step: 1000 * time_once(step_case(run), CPU) for step, run in steps.items()})
    least = {step: min(one[step] for one in rounds) for step in steps}
    return {"pattern": name, "tokens": tokens, "milliseconds": least}
