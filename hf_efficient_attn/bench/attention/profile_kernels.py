"""The kernel calls of one call of attention, each timed alone."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_efficient_attn.backends.blocked import backend as blocked
from hf_efficient_attn.backends.blocked import execute
from hf_efficient_attn.backends.flex import backend as flex
from hf_efficient_attn.bench.attention.cases import Shape, own_call, pattern_of
from hf_efficient_attn.bench.attention.measure import Row, call_of
from hf_efficient_attn.bench.attention.profile_cases import ProfileCase, as_case
from hf_efficient_attn.bench.harness.timing import time_once
from hf_efficient_attn.layout.call import AttentionCall, inputs_of
from hf_efficient_attn.layout.layout import Layout

CPU = torch.device("cpu")
FORWARD_KERNEL = "aten::_scaled_dot_product_flash_attention_for_cpu"
BACKWARD_KERNEL = f"{FORWARD_KERNEL}_backward"
COMPILED_KERNEL = "## Call CompiledFxGraph"
KERNELS = {FORWARD_KERNEL: "kernel, forward", BACKWARD_KERNEL: "kernel, backward", COMPILED_KERNEL: "kernel, forward"}


def kernels_of(case: ProfileCase, shape: Shape, layout: Layout, inputs: list[Tensor], backend: str) -> list[Row]:
    """Return the kernel calls of one call, alone."""
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
    """A dispatch mode that repeats every call of the fused kernel, and keeps its shape and how long the repeat took."""

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
    """Return the calls of the fused kernel in `run`, in which calls of equal block length and keys are joined."""
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
    """Return the compiled kernel of flex, its seconds taken from those per pair of a pattern without partial blocks."""
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
