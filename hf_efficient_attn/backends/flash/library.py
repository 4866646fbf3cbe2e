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
# the version whose private functions are called, as in pyproject.toml
INSTALL = f'pip install --pre "{PACKAGE}~=4.0.0b36"'
FORWARD = "softmax_scale softcap window_size_left window_size_right learnable_sink cu_seqlens_q cu_seqlens_k"
FORWARD += " max_seqlen_q max_seqlen_k mask_mod aux_tensors block_sparse_tensors return_lse out lse"
BACKWARD = "softmax_scale softcap window_size_left window_size_right cu_seqlens_q cu_seqlens_k max_seqlen_q"
BACKWARD += " max_seqlen_k mask_mod aux_tensors block_sparse_tensors dlse deterministic dq dk dv"
# major numbers of compute capability: Ampere, Hopper, Blackwell and Thor
AMPERE, HOPPER, BLACKWELL, THOR = 8, 9, 10, 11
# widths of heads in elements: kernels load as many at once
ALIGNMENT = 8
# of queries and keys, and of values, in DeepSeek V3 and MiMo-V2: the only unequal widths that are called
UNEQUAL = (192, 128)


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
        AttributeError: it lacks one of the functions.
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
def why_not_installed() -> str | None:
    """Return why FlashAttention-4 cannot be called, as the end of a sentence; None: it can."""
    # the folder may belong to an older version, whose import may end in any error
    try:
        if find_spec("flash_attn.cute") is None:
            return "is not installed"
        library()
    except ModuleNotFoundError as error:
        return "is not installed" if error.name == "flash_attn" else f"cannot be imported ({error})"
    except Exception as error:
        return f"cannot be imported ({type(error).__name__}: {error})"
    return None


def block_size(generation: int) -> tuple[int, int]:
    """Return (queries, keys) of a block of the tables: on Blackwell a kernel computes two tiles of queries at once."""
    return (128, 128) if generation < BLACKWELL else (256, 128)


def has_kernel(
    generation: int, head_dim: int, value_dim: int, has_mask: bool, needs_grad: bool, is_grouped: bool
) -> bool:
    """Return whether a GPU's kernels compute heads of a width; `tests/flash_compile.py` compiles the limits.

    Args:
        has_mask: whether a function says which pairs are allowed, with tables of blocks.
        is_grouped: whether several query heads share keys.
    """
    if head_dim % ALIGNMENT or value_dim % ALIGNMENT:
        return False
    if head_dim == value_dim:
        return head_dim <= (256 if generation == HOPPER and not has_mask else 128)
    is_known = (head_dim, value_dim) == UNEQUAL and generation != AMPERE and not has_mask
    return is_known and not (generation == HOPPER and needs_grad and is_grouped)


def generation_of(device: torch.device | str) -> int:
    """Return the major number of the compute capability of a GPU."""
    return gpu_generation(torch.device(device).type)
