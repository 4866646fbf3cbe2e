"""FlashAttention-4 (`pip install --pre flash-attn-4`): the functions that are called, and the GPUs they run on.

Its kernels are written in CuTe DSL and compiled at the first call of each kind, in seconds. Its public functions
have no backward pass for a part of the keys, so the private functions below them are called; `library` checks that
these take the arguments that are passed.
"""

from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from inspect import signature
from typing import Any, NamedTuple

import torch

from hf_efficient_attn.backends.machine_costs import gpu_generation

PACKAGE = "flash-attn-4"
FORWARD = "softmax_scale softcap window_size_left window_size_right learnable_sink cu_seqlens_q cu_seqlens_k"
FORWARD += " max_seqlen_q max_seqlen_k mask_mod aux_tensors block_sparse_tensors return_lse"
BACKWARD = "softmax_scale softcap window_size_left window_size_right cu_seqlens_q cu_seqlens_k max_seqlen_q"
BACKWARD += " max_seqlen_k mask_mod aux_tensors block_sparse_tensors dlse deterministic"
# major numbers of compute capability: Ampere, Hopper, Blackwell
AMPERE, HOPPER, BLACKWELL = 8, 9, 10


class Library(NamedTuple):
    """The functions of FlashAttention-4 that are called.

    Attributes:
        forward: (q, k, v, **options) -> (out, lse, ...).
        backward: (q, k, v, out, grad, lse, **options) -> (dq, dk, dv).
        combine: (outs [parts, batch, tokens, heads, width], lses [parts, batch, tokens, heads], out, lse): writes the
            last two.
        tables: (partial counts, partial indices, full counts, full indices, block_size) -> tables of blocks.
        jit: turns a function of pairs into one that kernels can call.
        look: (tensor of integers, *indices) -> its entry; for use in a function of pairs.
    """

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    combine: Callable[..., Any]
    tables: Callable[..., Any]
    jit: Callable[[Any], Any]
    look: Callable[..., Any]


@lru_cache
def library() -> Library:
    """Return the functions of the installed version.

    Raises:
        ImportError: it is not installed, or its functions do not take the arguments that are passed.
    """
    from cutlass import Int32, cute
    from flash_attn.cute import block_sparsity, interface, utils

    for function, names in ((interface._flash_attn_fwd, FORWARD), (interface._flash_attn_bwd, BACKWARD)):
        missing = set(names.split()) - signature(function).parameters.keys()
        if missing:
            raise ImportError(f"{function.__name__} of {PACKAGE} does not take {', '.join(sorted(missing))}")

    def look(tensor: Any, *indices: Any) -> Any:
        return utils.scalar_to_ssa(
            tensor[tuple(index if isinstance(index, int) else index[0] for index in indices)], Int32
        )

    return Library(
        interface._flash_attn_fwd,
        interface._flash_attn_bwd,
        interface._flash_attn_fwd_combine,
        lambda *tables: block_sparsity.BlockSparseTensorsTorch(*tables[:4], block_size=tables[4]),
        cute.jit,
        look,
    )


@lru_cache
def is_installed() -> bool:
    """Return whether FlashAttention-4 is installed in a version that takes the arguments that are passed."""
    if find_spec("flash_attn") is None or find_spec("flash_attn.cute") is None:
        return False
    try:
        library()
    except ImportError:
        return False
    return True


def block_size(generation: int) -> tuple[int, int]:
    """Return (queries, keys) of a block of the tables: on Blackwell a kernel computes two tiles of queries at once."""
    return (128, 128) if generation < BLACKWELL else (256, 128)


def largest_head(generation: int, has_mask: bool) -> int:
    """Return the largest head size for which a GPU's kernels compute windows, or masks with tables of blocks."""
    return 256 if generation == HOPPER and not has_mask else 128


def generation_of(device: torch.device | str) -> int:
    """Return the major number of the compute capability of a GPU."""
    return gpu_generation(torch.device(device).type)
