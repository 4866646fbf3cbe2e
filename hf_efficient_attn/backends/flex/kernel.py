"""The kernels of flex, compiled once per kind of call; other lengths, batches and random draws reuse them."""

from collections.abc import Callable
from functools import lru_cache
from itertools import count
from types import FunctionType

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask, FlexKernelOptions, flex_attention

from hf_efficient_attn.backends.flex.mods import Mods, ScoreMod

_numbers = count()


def run(
    q: Tensor, k: Tensor, v: Tensor, mods: Mods, mask: BlockMask, scale: float, need_lse: bool
) -> tuple[Tensor, AuxOutput]:
    """Return the output and, if needed, lse, which kernels for CPUs do not return."""
    aux = AuxRequest(lse=need_lse)
    if torch.compiler.is_compiling():
        # this becomes part of the program that is being compiled
        return _flex(q, k, v, mods.score_mod, mask, scale, aux)
    kind = (
        mods.kind,
        # torch recompiles when one of these becomes 1
        tuple(size == 1 for size in (*mask.kv_indices.shape, q.shape[0], q.shape[2], k.shape[2])),
        (q.shape[1], k.shape[1], q.shape[3], v.shape[3], q.dtype, q.device, scale),
        (torch.is_grad_enabled(), mask.q_indices is None, need_lse),
        tuple((memory_order(tensor), tuple(stride == 0 for stride in tensor.stride())) for tensor in (q, k, v)),
    )
    return _compiled(kind)(q, k, v, mods.score_mod, mask, scale, aux)


def memory_order(tensor: Tensor) -> tuple[bool, bool]:
    """Return whether the memory order is [batch, heads, tokens, width], and whether [batch, tokens, heads, width]."""
    return tensor.is_contiguous(), tensor.transpose(1, 2).is_contiguous()


@lru_cache(maxsize=256)
def _compiled(kind: object) -> Callable[..., tuple[Tensor, AuxOutput]]:
    """Return the function compiled for calls of one kind, whatever their lengths.

    torch stops compiling code that it has compiled a few times, and makes dynamic whatever differs between calls of
    code with the same name. Every kind therefore gets its own code object and name.
    """
    own = FunctionType(_flex.__code__.replace(co_name=f"flex_{next(_numbers)}"), _flex.__globals__)
    return torch.compile(own, fullgraph=True)


def _flex(
    q: Tensor, k: Tensor, v: Tensor, score_mod: ScoreMod | None, mask: BlockMask, scale: float, aux: AuxRequest
) -> tuple[Tensor, AuxOutput]:
    # below 128 queries, torch would take a kernel that stacks the queries of heads that share keys, and fails if
    # these are then too many for its blocks
    is_single = q.shape[2] == 1
    # a branch, because a compiler must know the value of an option
    options: FlexKernelOptions = {} if is_single else {"FORCE_USE_FLEX_ATTENTION": True}
    return flex_attention(q, k, v, score_mod, mask, scale, enable_gqa=True, kernel_options=options, return_aux=aux)
