"""All timings of one length: every call runs once before the clock starts, then they take turns."""

import time
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException

from hf_efficient_attn.attention.explained_call import allowed_pairs
from hf_efficient_attn.attention.select import select
from hf_efficient_attn.backends.blocked import backend as blocked
from hf_efficient_attn.backends.flex import backend as flex
from hf_efficient_attn.backends.kernels import is_fused
from hf_efficient_attn.backends.machine_costs import costs_of
from hf_efficient_attn.bench.attention.cases import (
    DENSE,
    Call,
    Shape,
    clear_caches,
    decode_case,
    decode_lengths,
    dense_call,
    own_call,
    pattern_of,
    repeated,
)
from hf_efficient_attn.bench.attention.peers import PEERS, Problem, build_peer, peers_of
from hf_efficient_attn.bench.harness.timing import Case, Timing, synchronize, time_once, time_within
from hf_efficient_attn.errors import ConfigurationError, EfficientAttentionError, UnsupportedBackendError
from hf_efficient_attn.layout.blocks.compile import compile_layout
from hf_efficient_attn.layout.blocks.table import block_table
from hf_efficient_attn.layout.call import AttentionCall, Inputs
from hf_efficient_attn.layout.layout import Layout

Row = dict[str, Any]
Failures = tuple[type[Exception], ...]

MEASURES = ("forward", "forward_backward", "decode")
# one sample of the clock holds several calls where they are short, at most so many seconds, tokens and calls
SAMPLE_SECONDS = 0.05
SAMPLE_TOKENS = 4096
SAMPLE_CALLS = 16
# what may go wrong is a result: ours refuses, needs too much memory or cannot be compiled; others fail in ways of their
# own
OWN_FAILURES: Failures = (UnsupportedBackendError, torch.OutOfMemoryError, TorchDynamoException)


def measure_length(tokens: int, shape: Shape, settings: dict[str, Any]) -> tuple[Row, list[Row]]:
    """Return the row of dense attention and those of all patterns and contestants.

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
        failures = OWN_FAILURES if is_ours else (Exception,)
        passes |= {f"{index} {measure}": case for measure, case in probe(row, inputs, settings, failures).items()}
        if is_ours:
            steps |= {f"{index} decode": case for case in probe_decode(row, inputs)}
    for cases in (passes, steps):
        timings = time_within(cases, settings["repeats"], settings["max_seconds"], tokens, inputs[0].device)
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
    """Return whether a row is of a backend of ours or of dense attention."""
    return row["contestant"] in (DENSE, *settings["backends"])


def build(row: Row, inputs: list[Tensor], settings: dict[str, Any]) -> Call | str:
    """Return the call of a row, or the sentence that says why there is none."""
    tokens, contestant = row["tokens"], row["contestant"]
    if contestant == DENSE:
        limit = settings["dense_limit"]
        return dense_call(inputs) if tokens <= limit else f"measured up to {limit:,} tokens."
    if contestant in settings["backends"]:
        return own_call(pattern_of(row["pattern"], tokens), inputs, contestant)
    first, last = PEERS[contestant].from_tokens, settings["peer_limit"]
    if not first <= tokens <= last:
        return f"measured from {first:,} to {last:,} tokens."
    return build_peer(contestant, Problem(row["pattern"], inputs))


def probe(row: Row, inputs: list[Tensor], settings: dict[str, Any], failures: Failures) -> dict[str, Case]:
    """Run the passes of a row once and return those that can be timed; the others get a reason."""
    try:
        call = build(row, inputs, settings)
        reason = call if isinstance(call, str) else None
    except failures as error:
        reason = one_line(error)
    if reason is not None or isinstance(call, str):
        row["forward"] = row["forward_backward"] = {"reason": reason}
        return {}
    device = inputs[0].device
    out: list[Tensor] = []
    start = time.perf_counter()
    if not attempt(row, "forward", Case(lambda _: out.append(call.run_forward())), failures, device):
        row["forward_backward"] = row["forward"]
        return {}
    row["first_call_milliseconds"] = 1000 * (time.perf_counter() - start)
    cases = {"forward": call.forward_case()}
    if call.no_backward is not None:
        row["forward_backward"] = {"reason": call.no_backward}
    else:
        training = call.forward_backward_case(torch.ones_like(out[0]))
        if attempt(row, "forward_backward", training, failures, device):
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
    return [case] if attempt(row, "decode", case, OWN_FAILURES, inputs[0].device) else []


def calls_per_sample(case: Case, tokens: int, device: torch.device) -> int:
    """Return how many calls are timed together, as one sample."""
    limit = min(SAMPLE_CALLS, SAMPLE_TOKENS // tokens)
    return 1 if limit <= 1 else max(1, min(limit, int(SAMPLE_SECONDS / time_once(case, device))))


def attempt(row: Row, measure: str, case: Case, failures: Failures, device: torch.device) -> bool:
    """Run a case once and return whether it could run; if not, write the reason into the row."""
    try:
        time_once(case, device)
    except failures as error:
        row[measure] = {"reason": one_line(error)}
        return False
    return True


def one_line(error: Exception) -> str:
    """Return the first line of an error, with its name unless it is a sentence of ours."""
    text = (str(error).strip() or "no message").splitlines()[0]
    return text if isinstance(error, EfficientAttentionError) else f"{type(error).__name__}: {text}"


def write_timings(rows: list[Row], timings: dict[str, Timing]) -> None:
    """Write milliseconds into the rows, and every sample beside them, so that rounds can be compared."""
    for key, timing in timings.items():
        index, measure = key.split()
        row = rows[int(index)]
        units = len(decode_lengths(row["tokens"])) if measure == "decode" else row["calls"][measure]
        row[measure] = timing.record(units)


def describe(row: Row, shape: Shape, is_ours: bool) -> None:
    """Write the pairs into a row; of ours also the backend that computes it and the time to build its layout."""
    tokens = row["tokens"]
    layout = Layout(pattern_of(row["pattern"], tokens), shape.num_heads, tokens, tokens)
    row |= {"num_heads": shape.num_heads, "allowed_pairs": allowed_pairs(layout)}
    if is_ours and "milliseconds" in row["forward"]:
        call = call_of(layout, shape)
        chosen = select(call, row["contestant"])
        row["backend"] = chosen.NAME
        row["computed_pairs"] = chosen.computed_pairs(call)
        row["layout_milliseconds"] = 1000 * layout_seconds(call, row["contestant"])


def call_of(layout: Layout, shape: Shape) -> AttentionCall:
    """Return the call of a forward pass, without tensors."""
    dtype = getattr(torch, shape.dtype)
    inputs = Inputs(shape.device, dtype, shape.head_dim, shape.head_dim, shape.num_heads, shape.batch_size)
    return AttentionCall(layout, inputs)


def layout_seconds(call: AttentionCall, backend: str) -> float:
    """Return how long it takes to choose a backend and to build what it needs of the pattern, with empty caches."""
    device = torch.device(call.inputs.device)
    clear_caches()
    start = time.perf_counter()
    name = select(call, backend).NAME
    if name == blocked.NAME:
        compile_layout(call.layout, costs_of(call).forward.of_kernel(is_fused(call)), device)
    elif name == flex.NAME:
        block_table(call.layout, None, flex.BLOCK_SIZES[call.inputs.device], device)
    synchronize(device)
    return time.perf_counter() - start
