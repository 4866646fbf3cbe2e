"""The kernels of flex, one compiled for each kind of call: another length, batch or random draw finds it again."""

from collections.abc import Callable
from functools import lru_cache
from itertools import count
from types import FunctionType

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask, flex_attention

from hf_efficient_attn.backends.flex.mods import Mods, ScoreMod

_numbers = count()


def run(
    q: Tensor, k: Tensor, v: Tensor, mods: Mods, mask: BlockMask, scale: float, need_lse: bool
) -> tuple[Tensor, AuxOutput]:
    """Return output and, where it is needed, lse, which kernels for CPUs do not give."""
    aux = AuxRequest(lse=need_lse)
    if torch.compiler.is_compiling():
        # becomes a part of the program that is being compiled
        return _flex(q, k, v, mods.score_mod, mask, scale, aux)
    kind = (
        mods.kind,
        # torch compiles anew where one of these becomes 1
        tuple(size == 1 for size in (*mask.kv_indices.shape, q.shape[0], q.shape[2], k.shape[2])),
        (q.shape[1], k.shape[1], q.shape[3], v.shape[3], q.dtype, q.device, scale),
        (torch.is_grad_enabled(), mask.q_indices is None, need_lse),
        tuple((memory_order(tensor), tuple(stride == 0 for stride in tensor.stride())) for tensor in (q, k, v)),
    )
    return _compiled(kind)(q, k, v, mods.score_mod, mask, scale, aux)


def memory_order(tensor: Tensor) -> tuple[bool, bool]:
    """Return whether the tensor lies as [batch, heads, tokens, width], and whether as [batch, tokens, heads, width]."""
    return tensor.is_contiguous(), tensor.transpose(1, 2).is_contiguous()


@lru_cache(maxsize=256)
def _compiled(kind: object) -> Callable[..., tuple[Tensor, AuxOutput]]:
    """Return the function compiled for calls of one kind, whatever their lengths.

    torch counts how often a piece of code was compiled, gives up after a few times, and takes for variable what
    differed between calls of code of the same name: every kind gets its own code and name.
    """
    own = FunctionType(_flex.__code__.replace(co_name=f"flex_{next(_numbers)}"), _flex.__globals__)
    return torch.compile(own, fullgraph=True)


def _flex(
    q: Tensor, k: Tensor, v: Tensor, score_mod: ScoreMod | None, mask: BlockMask, scale: float, aux: AuxRequest
) -> tuple[Tensor, AuxOutput]:
    return flex_attention(q, k, v, score_mod, mask, scale, enable_gqa=True, return_aux=aux)
