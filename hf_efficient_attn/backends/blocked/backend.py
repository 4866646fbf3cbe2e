"""The blocked backend: pure PyTorch, time and memory linear in the length, forward and backward, on any device."""

from collections import Counter
from dataclasses import dataclass
from functools import partial
from math import inf

import torch

from hf_efficient_attn.backends import operator
from hf_efficient_attn.backends.kernels import is_fused
from hf_efficient_attn.backends.machine_costs import Costs, costs_of
from hf_efficient_attn.errors import WorkLimitError
from hf_efficient_attn.layout.block_layout import BlockCosts
from hf_efficient_attn.layout.cache import cached
from hf_efficient_attn.layout.call import AttentionCall
from hf_efficient_attn.layout.compile import compile_layout
from hf_efficient_attn.layout.layout import Layout

# How much the blocked backend would compute for a layout, counted without computing it.


CPU = torch.device("cpu")


@dataclass(frozen=True)
class Estimate:
    """What is computed for one example.

    Attributes:
        num_pairs, num_gathered, num_runs, num_moved, num_mask_bytes: as in `BlockLayout`.
        scores_time: time of the scores, in scores of dense attention, as if no block were shorter than those measured.
        num_short_reads: keys of shorter blocks, each weighted by the share of queries that its block lacks.
        block_tokens: the length in queries of the blocks that hold most pairs.
        refusal: why the layout is refused, as a sentence; None: it is computed.
    """

    num_pairs: int = 0
    num_gathered: int = 0
    num_runs: int = 0
    num_moved: int = 0
    num_mask_bytes: int = 0
    scores_time: float = 0.0
    num_short_reads: float = 0.0
    block_tokens: int = 0
    refusal: str | None = None

    def time(self, costs: Costs) -> float:
        """Return the time in scores of dense attention; infinite if the layout is refused."""
        if self.refusal is not None:
            return inf
        reading = costs.key * self.num_short_reads + costs.gathered * self.num_gathered
        return self.scores_time + reading + costs.moved * self.num_moved + costs.call + costs.run * self.num_runs


def time(call: AttentionCall) -> float:
    """Return the time of a call, forward and backward if it needs gradients, in scores of dense attention."""
    costs, fused = costs_of(call), is_fused(call)
    passes = costs.shares(call.inputs.needs_grad)
    return sum(share * estimate(call.layout, each.of_kernel(fused)).time(costs) for each, share in passes)


def forward_estimate(call: AttentionCall) -> Estimate:
    """Return how much the forward pass of a call computes."""
    return estimate(call.layout, costs_of(call).forward.of_kernel(is_fused(call)))


@cached()
def estimate(layout: Layout, blocks: BlockCosts) -> Estimate:
    """Return how much the backend computes for a layout of one whole document.

    If the pattern fits only a shorter length, the layout is taken as several documents of that length.
    """
    fitted = layout.fitted
    documents = max(1, layout.num_keys // fitted.num_keys)
    try:
        compiled = compile_layout(fitted, blocks, CPU)
    except WorkLimitError as error:
        return Estimate(refusal=str(error))
    shortest, pairs = blocks.lengths[0], Counter[int]()
    for partition, run in compiled.runs():
        pairs[run.block_tokens] += partition.num_heads * run.num_pairs
    return Estimate(
        block_tokens=max(pairs, key=pairs.__getitem__, default=0),
        num_pairs=documents * compiled.num_pairs,
        num_gathered=documents * compiled.num_gathered,
        num_runs=documents * compiled.num_runs,
        num_moved=documents * compiled.num_moved,
        num_mask_bytes=compiled.num_mask_bytes,
        scores_time=documents
        * sum(
            partition.num_heads * run.num_pairs * blocks.of_score(run.block_tokens)
            for partition, run in compiled.runs()
        ),
        num_short_reads=documents
        * sum(
            partition.num_heads * run.num_keys * max(0.0, 1 - run.block_tokens / shortest)
            for partition, run in compiled.runs()
        ),
    )


NAME = "blocked"
attend = partial(operator.attend, name=NAME)
RANK = 30
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def why_not(call: AttentionCall) -> str | None:
    """Return one sentence on why this backend cannot compute a call; None: it can."""
    if call.inputs.dtype not in DTYPES:
        known = ", ".join(str(dtype) for dtype in DTYPES)
        return f"blocked computes in {known}, not in {call.inputs.dtype}: convert the inputs."
    if call.chosen is not None:
        return "blocked cannot compute keys that are selected by content: use gathered."
    return None


def missing(call: AttentionCall) -> str | None:
    """Return None: nothing needs to be installed."""
    return None


def is_fastest(call: AttentionCall) -> bool:
    """Return False: others may be faster."""
    return False


def cost(call: AttentionCall) -> float:
    """Return the estimated time for one example, in scores of dense attention; infinite if the masks are refused."""
    return time(call)


def rank(call: AttentionCall) -> int | None:
    """Return its rank for every call, because compilers do not trace its operator; special kernels rank before it."""
    return RANK


def remark(call: AttentionCall) -> str:
    """Return what it computes, or why its masks are refused."""
    found = forward_estimate(call)
    return found.refusal or (
        f"blocked computes the blocks that hold an allowed pair, most of them with {found.block_tokens} queries."
    )


def computed_pairs(call: AttentionCall) -> int:
    """Return how many scores its blocks hold, in all heads."""
    return forward_estimate(call).num_pairs


def working_bytes(call: AttentionCall) -> int:
    """Return the memory of the masks of its blocks."""
    return forward_estimate(call).num_mask_bytes
