"""How much the blocked backend would compute for a layout, counted without computing it."""

from dataclasses import dataclass
from math import inf

import torch

from hf_efficient_attn.backends.kernels import is_fused
from hf_efficient_attn.errors import WorkLimitError
from hf_efficient_attn.layout.blocks.compile import compile_layout
from hf_efficient_attn.layout.blocks.layout import SCORES_PER_RUN
from hf_efficient_attn.layout.cache import cached
from hf_efficient_attn.layout.call import AttentionCall
from hf_efficient_attn.layout.layout import Layout

# queries per block, those of the fused forward pass
BLOCK_TOKENS = 32


@dataclass(frozen=True)
class Costs:
    """Times, in scores of dense attention without a mask: per score, per key read for a block of queries, per run.

    moved: per query that is moved to its place in a token order and back.
    """

    score: float
    key: float
    run: float
    moved: float


# the last one is measured on grids of 400 to 3,136 tokens, one thread
ON_CPU = Costs(1.15, 8, SCORES_PER_RUN, 600)
# of the explicit kernel (soft caps, terms, dropout): measured 3.2 to 4, up to 5 with a cap (4,096 tokens, one thread)
EXPLICIT_ON_CPU = Costs(3.5, 8, SCORES_PER_RUN, 600)
# no fused kernel runs there, and a run waits for about twenty launches; estimated, not measured
ELSEWHERE = Costs(12, 8, 5e7, 600)


@dataclass(frozen=True)
class Estimate:
    """What is computed for one example.

    Attributes:
        num_pairs, num_key_reads, num_runs, num_moved, num_mask_bytes: as in `BlockLayout`.
        refusal: why the layout is refused, as a sentence; None: it is computed.
    """

    num_pairs: int = 0
    num_key_reads: int = 0
    num_runs: int = 0
    num_moved: int = 0
    num_mask_bytes: int = 0
    refusal: str | None = None

    def time(self, costs: Costs) -> float:
        """Return the time in scores of dense attention; infinite where the layout is refused."""
        if self.refusal is not None:
            return inf
        of_scores = costs.score * self.num_pairs + costs.key * self.num_key_reads
        return of_scores + costs.run * self.num_runs + costs.moved * self.num_moved


def costs_of(call: AttentionCall) -> Costs:
    """Return the costs of the kernel that computes a call."""
    if call.inputs.device != "cpu":
        return ELSEWHERE
    return ON_CPU if is_fused(call) else EXPLICIT_ON_CPU


@cached()
def estimate(layout: Layout) -> Estimate:
    """Return how much the backend computes for a layout, taken as one whole document."""
    try:
        blocks = compile_layout(layout, BLOCK_TOKENS, torch.device("cpu"))
    except WorkLimitError as error:
        return Estimate(refusal=str(error))
    return Estimate(blocks.num_pairs, blocks.num_key_reads, blocks.num_runs, blocks.num_moved, blocks.num_mask_bytes)
