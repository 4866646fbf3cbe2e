"""What attention costs on this machine, in scores of dense attention: measured in rounds, all cases in turns."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hf_efficient_attn.backends import dense_kernel
from hf_efficient_attn.backends.blocked import execute
from hf_efficient_attn.backends.blocked.views import take
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
)
from hf_efficient_attn.bench.attention.cases import repeated
from hf_efficient_attn.bench.harness.timing import Case, Timing, clock_of, time_interleaved
from hf_efficient_attn.layout.blocks.block_costs import BlockCosts
from hf_efficient_attn.layout.blocks.compile import compile_layout
from hf_efficient_attn.layout.blocks.layout import BlockLayout
from hf_efficient_attn.layout.call import AttentionCall, Inputs
from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.patterns.bands import Band, Dilated
from hf_efficient_attn.patterns.pattern import Pattern

LENGTHS = (32, 64, 96, 128, 192, 256)
BAND, TOKENS, NUM_HEADS, HEAD_DIM = Band(256, 256), 2048, 4, 64
# of calls that are all fixed time, of one kernel or of so many; so many calls are timed together
FEW_TOKENS, NUM_RUNS, CALLS = 32, 8, 20
# larger than any score of the inputs: kernels with caps compute what others would
SOFTCAP = 100.0
# of the time of a pass in bfloat16, which takes less memory
MOST_IF_WIDENED = 0.9
# mask, triangle, scale, dropout, log-sum-exp
NO_OPTIONS = (None, False, HEAD_DIM**-0.5, 0.0, False)


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
        """Return the costs, by the fastest of `repeats` rounds, and by how much these disagree.

        Others slow a machine down, and nobody speeds it up. A single thread counts the time in which it works.
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
        """Return the machine at hand, which computes bfloat16 in float32 in the passes that take less time so."""
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
        lengths = [tokens for tokens in LENGTHS if f"{tokens} {direction}" in seconds]
        blocks = BlockCosts(tuple((tokens, of(str(tokens), tokens)) for tokens in lengths))
        blocks = blocks if lengths else BlockCosts.only(EXPLICIT_BLOCK_TOKENS, explicit)
        known: PassCosts = getattr(costs_of(self.band), direction)
        return PassCosts(blocks, explicit, masked / seconds[f"dense {direction}"], known.is_widened)

    def blocks_of(self, call: AttentionCall, tokens: int) -> BlockLayout:
        """Return the layout of a call in blocks of some length."""
        return compile_layout(call.layout, BlockCosts.only(tokens), self.device)

    def dense_cases(self) -> dict[str, Case]:
        """Return the cases of dense attention."""
        mask = torch.zeros(TOKENS, TOKENS, device=self.device, dtype=self.dtype).triu_()
        return {**self.both("dense", None), **self.both("masked", mask)}

    def both(self, name: str, mask: Tensor | None) -> dict[str, Case]:
        """Return the passes of torch's dense attention, as sdpa computes each alone."""
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
        """Return the passes of blocked, with blocks of each length where they have a kernel of their own."""
        cases = self.passes("explicit", EXPLICIT_BLOCK_TOKENS, self.call(TOKENS, BAND, SOFTCAP))
        for tokens in LENGTHS if is_fused(self.band) else ():
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
        """Return what is neither a pass of all tokens nor dense."""
        q, k, v = self.inputs
        residues = Dilated(NUM_RUNS, NUM_RUNS, NUM_RUNS)
        few = (q[:, :, :FEW_TOKENS], k[:, :, :FEW_TOKENS], v[:, :, :FEW_TOKENS])
        # as they are when blocks of them are read
        states, *keys = (each[0] for each in costs_of(self.band).forward.in_fast_dtype(q, k, v))
        cases = {
            "one kernel": repeated(case(partial(execute.forward, *few, self.call(FEW_TOKENS, Band(1, 1)))), CALLS),
            "many kernels": repeated(case(partial(execute.forward, *few, self.call(FEW_TOKENS, residues))), CALLS),
            "single query": repeated(case(partial(dense_kernel.fused, q[:, :, :1], k, v, *NO_OPTIONS)), CALLS),
            "gathered keys": case(partial(gather_keys, keys, self.order)),
            "moved queries": case(partial(move_queries, states, self.order, torch.empty_like(states))),
        }
        if self.device.type == "cuda":
            cases["flex"] = case(partial(flex.attend, *self.inputs, self.band, False))
        return cases


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return what torch's dense attention returns, computed in a dtype."""
    states = [each.to(dtype) for each in (q, k, v)]
    mask = None if mask is None else mask.to(dtype)
    return scaled_dot_product_attention(states[0], states[1], states[2], attn_mask=mask).to(q.dtype)


def gather_keys(keys: Sequence[Tensor], order: Tensor) -> None:
    """Copy all keys and values in another order."""
    for tensor in keys:
        take(tensor, order, torch.empty_like(tensor))


def move_queries(states: Tensor, order: Tensor, back: Tensor) -> None:
    """Take all queries, and what was computed of their rows, to their places in another order, and back."""
    for tensor in (states, states):
        moved = tensor[:, order]
    back.index_copy_(1, order, moved)


def fastest(timings: Mapping[str, Timing]) -> dict[str, float]:
    """Return the seconds of the fastest round of each case."""
    return {name: min(timing.seconds) for name, timing in timings.items()}


def disagreement(timings: Mapping[str, Timing]) -> float:
    """Return by which part the median round exceeds the fastest one, in the median of all cases.

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
    """Return a case that is computed as on some machine."""

    def run(state: object) -> None:
        with on_machine(machine):
            plain.run(state)

    return Case(run, plain.prepare)
