"""How far what "auto" chooses is from the best of all backends and lengths of blocks."""

import time
from typing import Any

import torch

from hf_efficient_attn.attention.select import AUTO, is_light
from hf_efficient_attn.backends import sdpa
from hf_efficient_attn.backends.blocked.backend import NAME as BLOCKED
from hf_efficient_attn.backends.machine_costs import machine_of
from hf_efficient_attn.bench.attention.cases import Call, Shape, own_call, pattern_of
from hf_efficient_attn.bench.attention.measure import call_of
from hf_efficient_attn.bench.calibrate.measure import LENGTHS, on, uniform
from hf_efficient_attn.bench.harness.timing import Case, clock_of, time_within
from hf_efficient_attn.layout.layout import Layout

PATTERNS = ("band", "longformer", "bigbird", "dilated")
# rounds at most
REPEATS = 15
FORWARD, BOTH = "forward", "forward + backward"
Row = dict[str, Any]


def check(
    patterns: list[str], lengths: list[int], shape: Shape, seconds: float, all_seconds: float | None = None
) -> list[Row]:
    """Return a row per pattern, length and measure: the time of "auto" over that of the fastest way.

    Args:
        seconds: of rounds per row.
        all_seconds: after which no further row is begun, but for the first two; None: all are.
    """
    device, start = torch.device(shape.device), time.perf_counter()
    rows: list[Row] = []
    for tokens in lengths:
        for name in patterns:
            for measure in (FORWARD, BOTH):
                if len(rows) > 1 and all_seconds is not None and time.perf_counter() - start > all_seconds:
                    return rows
                cases = contestants(name, tokens, measure, shape)
                timings = time_within(cases, REPEATS, seconds, tokens, device, clock_of(device))
                # of the fastest rounds: what else the machine does slows some
                times = {way: 1000 * min(timing.seconds) for way, timing in timings.items()}
                fastest = min(times, key=times.__getitem__)
                over = times[AUTO] / times[fastest]
                rows.append({"pattern": name, "tokens": tokens, "measure": measure, "over_fastest": over})
                rows[-1] |= {"fastest": fastest, "milliseconds": times}
    return rows


def contestants(name: str, tokens: int, measure: str, shape: Shape) -> dict[str, Case]:
    """Return "auto", dense attention with a mask where it takes little memory, and blocks of every length."""
    inputs, pattern = shape.tensors(tokens), pattern_of(name, tokens)
    target = torch.ones_like(inputs[0])

    def case_of(call: Call) -> Case:
        return call.forward_case() if measure == FORWARD else call.forward_backward_case(target)

    cases = {AUTO: case_of(own_call(pattern, inputs, AUTO))}
    if is_light(call_of(Layout(pattern, shape.num_heads, tokens, tokens), shape), sdpa.NAME, (BLOCKED,)):
        cases[sdpa.NAME] = case_of(own_call(pattern, inputs, sdpa.NAME))
    machine = machine_of(shape.device)
    for length in LENGTHS:
        way = case_of(own_call(pattern, inputs, BLOCKED))
        cases[f"blocks of {length}"] = on(uniform(machine, length), way)
    return cases
