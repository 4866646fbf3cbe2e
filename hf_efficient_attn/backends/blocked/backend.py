"""The blocked backend: pure PyTorch, time and memory linear in the length, forward and backward, on any device."""

import torch

from hf_efficient_attn.backends import operator
from hf_efficient_attn.backends.blocked.estimate import forward_estimate, time
from hf_efficient_attn.layout.call import AttentionCall

NAME = "blocked"
attend = operator.attend
RANK = 30
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def why_not(call: AttentionCall) -> str | None:
    """Return one sentence why this backend cannot compute a call; None: it can."""
    if call.inputs.dtype not in DTYPES:
        known = ", ".join(str(dtype) for dtype in DTYPES)
        return f"dtype {call.inputs.dtype} is none of {known}; convert the inputs."
    if call.chosen is not None:
        return "blocked knows only keys that a pattern names, not chosen ones: use gathered."
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


def rank_while_compiling(call: AttentionCall) -> int | None:
    """Return its rank for every call, since its operator is opaque to compilers: behind kernels for some calls."""
    return RANK


def remark(call: AttentionCall) -> str:
    """Return what it computes, or why its masks are refused."""
    found = forward_estimate(call)
    return found.refusal or (
        f"blocked computes the blocks of pairs that hold an allowed one, most of them of {found.block_tokens} queries."
    )


def computed_pairs(call: AttentionCall) -> int:
    """Return how many scores its blocks hold, in all heads."""
    return forward_estimate(call).num_pairs


def working_bytes(call: AttentionCall) -> int:
    """Return the memory of the masks of its blocks."""
    return forward_estimate(call).num_mask_bytes
