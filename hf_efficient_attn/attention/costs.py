"""What dense attention and the blocked backend cost, in time and memory: what "auto" and `explain` compare."""

from dataclasses import dataclass
from math import inf

import torch

from hf_efficient_attn.backends import sdpa
from hf_efficient_attn.errors import MaskLimitError
from hf_efficient_attn.layout.block_layout import SCORES_PER_RUN
from hf_efficient_attn.layout.cache import MEBIBYTE, cached
from hf_efficient_attn.layout.compile import compile_layout
from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.layout.request import Request

# times in scores of dense attention without a mask: a score of the blocked backend, a key read for a block of queries
# (what a single query mostly waits for), a score with a mask, and making a mask's entry
SCORES_PER_BLOCKED_SCORE = 1.15
SCORES_PER_KEY = 8
SCORES_PER_MASKED_SCORE = 1.1
SCORES_PER_MASK_ENTRY = 50
# below so many scores per head nothing is worth looking at
FEW_SCORES = 1 << 10
ESTIMATE_BLOCK_TOKENS = 32
# what dense attention may take for all pairs without being asked for; more only where the blocked backend takes as much
MAX_PAIR_BYTES = 256 * MEBIBYTE
MORE_THAN_BLOCKED = 2
# ... or refuses the pattern
MAX_PAIR_BYTES_ALONE = 4096 * MEBIBYTE


@dataclass(frozen=True)
class BlockedCost:
    """What the blocked backend computes for one example.

    Attributes:
        time: in scores of dense attention; infinite where it refuses.
        num_pairs: scores that it computes.
        num_mask_bytes: memory of its masks.
        refusal: the sentence with which it refuses; None: it computes it.
    """

    time: float
    num_pairs: int = 0
    num_mask_bytes: int = 0
    refusal: str | None = None


@cached()
def blocked_cost(layout: Layout) -> BlockedCost:
    """Return the estimated cost of a layout."""
    try:
        blocks = compile_layout(layout, ESTIMATE_BLOCK_TOKENS, torch.device("cpu"))
    except MaskLimitError as error:
        return BlockedCost(inf, refusal=str(error))
    per_score = SCORES_PER_BLOCKED_SCORE * blocks.num_pairs
    time = per_score + SCORES_PER_KEY * blocks.num_key_reads + SCORES_PER_RUN * blocks.num_runs
    return BlockedCost(time, blocks.num_pairs, blocks.num_mask_bytes)


def is_dense_light(request: Request) -> bool:
    """Return whether dense attention needs little memory for all pairs, or not much more than the blocked backend."""
    if request.is_compiling:
        # lengths may be symbols
        return True
    num_bytes = sdpa.num_pair_bytes(request)
    if num_bytes <= MAX_PAIR_BYTES:
        return True
    blocked = blocked_cost(request.layout)
    if blocked.refusal is not None:
        return num_bytes <= MAX_PAIR_BYTES_ALONE
    return num_bytes <= MORE_THAN_BLOCKED * blocked.num_mask_bytes


def has_few_scores(request: Request) -> bool:
    """Return whether nothing is worth a comparison."""
    return not request.is_compiling and request.layout.num_queries * request.layout.num_keys <= FEW_SCORES


def is_dense_faster(request: Request) -> bool:
    """Return whether dense attention with a mask is estimated to be faster than the blocked backend."""
    if request.is_compiling:
        # lengths may be symbols, which a comparison would pin down; the blocked operator is opaque to the compiler
        return False
    if has_few_scores(request):
        return True
    return dense_cost(request) <= blocked_cost(request.layout).time


def dense_cost(request: Request) -> float:
    """Return the estimated time of dense attention for one example, in scores."""
    layout = request.layout
    if sdpa.maskless(layout) is not None:
        per_key = float(layout.num_queries + SCORES_PER_KEY)
    else:
        # in cached decoding every step has a mask of its own
        per_mask = SCORES_PER_MASK_ENTRY * layout.num_queries if layout.query_offset else 0
        per_key = SCORES_PER_MASKED_SCORE * layout.num_queries + SCORES_PER_KEY + per_mask
    return layout.num_heads * layout.num_keys * per_key
