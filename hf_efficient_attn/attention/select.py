"""Which backend computes a request: the one that was asked for, or the fastest that can."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType

import torch

from hf_efficient_attn.backends import flex, reference, sdpa
from hf_efficient_attn.backends.blocked import backend as blocked
from hf_efficient_attn.errors import UnsupportedBackendError
from hf_efficient_attn.layout.block_layout import SCORES_PER_RUN
from hf_efficient_attn.layout.compile import compile_layout
from hf_efficient_attn.layout.request import Request
from hf_efficient_attn.messages import shown

AUTO = "auto"
BACKENDS: dict[str, ModuleType] = {module.NAME: module for module in (blocked, flex, reference, sdpa)}
# times in scores of dense attention without a mask: a score of the blocked backend, a key read for a block of queries
# (what a single query mostly waits for), a score with a mask, and making a mask's entry
SCORES_PER_BLOCKED_SCORE = 1.15
SCORES_PER_KEY = 8
SCORES_PER_MASKED_SCORE = 1.1
SCORES_PER_MASK_ENTRY = 50
# below so many scores per head nothing is worth looking at
FEW_SCORES = 1 << 10
ESTIMATE_BLOCK_TOKENS = 32


@dataclass(frozen=True, eq=False)
class Preference:
    """One block of `use_backend`, equal to no other."""

    name: str


# the block entered last at the end; a plain list, since a compiler can read no context variable
_preferred = [Preference(AUTO)]


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Compute every attention call within the block with the backend `name`, also those inside models, in all threads.

    Raises:
        UnsupportedBackendError: there is no backend of this name.
    """
    check_name(name)
    own = Preference(name)
    _preferred.append(own)
    try:
        yield
    finally:
        # blocks of several threads may overlap: each ends its own, and never that of another
        _preferred.remove(own)


def preferred_backend() -> str:
    """Return the name that `use_backend` has set; "auto" outside of it."""
    return _preferred[-1].name


def check_name(name: str) -> None:
    """Raise UnsupportedBackendError if `name` is neither a backend nor "auto"."""
    if name != AUTO and name not in BACKENDS:
        raise UnsupportedBackendError(
            f"backend={shown(name)} does not exist. Use {shown(AUTO)} or one of: {', '.join(sorted(BACKENDS))}."
        )


def select(request: Request, name: str = AUTO) -> ModuleType:
    """Return the backend module for a request.

    Args:
        name: of a backend, which is then used or refused, never replaced; or "auto".

    Raises:
        UnsupportedBackendError: there is no such backend, or it cannot compute the request; the message says why.
    """
    check_name(name)
    name = fastest(request) if name == AUTO else name
    reason = BACKENDS[name].why_not(request)
    if request.has_query_start and name != blocked.NAME:
        reason = f"a query_offset that is a tensor can be compiled by {shown(blocked.NAME)} only."
    if reason is not None:
        raise UnsupportedBackendError(
            f"backend={shown(name)} cannot compute this: {reason} Use backend='auto' to have one chosen that can."
        )
    return BACKENDS[name]


def fastest(request: Request) -> str:
    """Return the backend that "auto" takes.

    Dense attention where it needs no mask; off the CPU flex where it can, but for single queries; else blocked or dense
    with a mask, by cost.
    """
    if request.has_query_start:
        return blocked.NAME
    if not request.has_token_mask and sdpa.maskless(request.layout) is not None and sdpa.why_not(request) is None:
        return sdpa.NAME
    # a step of cached decoding has a length of its own, and flex would list its blocks on the host for every one
    is_step = request.layout.num_queries == 1
    if request.device != "cpu" and not is_step and flex.why_not(request) is None:
        return flex.NAME
    if sdpa.why_not(request) is None and is_dense_faster(request):
        return sdpa.NAME
    return blocked.NAME if blocked.why_not(request) is None else reference.NAME


def is_dense_faster(request: Request) -> bool:
    """Return whether dense attention with a mask is estimated to be faster than the blocked backend."""
    if request.is_compiling:
        # lengths may be symbols, which a comparison would pin down; the blocked operator is opaque to the compiler
        return False
    if request.layout.num_queries * request.layout.num_keys <= FEW_SCORES:
        return True
    return dense_cost(request) <= blocked_cost(request)


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


def blocked_cost(request: Request) -> float:
    """Return the estimated time of the blocked backend for one example, in scores of dense attention."""
    blocks = compile_layout(request.layout, ESTIMATE_BLOCK_TOKENS, torch.device("cpu"))
    per_score = SCORES_PER_BLOCKED_SCORE * blocks.num_pairs
    return per_score + SCORES_PER_KEY * blocks.num_key_reads + SCORES_PER_RUN * blocks.num_runs
