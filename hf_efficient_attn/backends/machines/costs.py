"""What attention costs on a machine, and which costs a call has."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_efficient_attn.layout.blocks.block_costs import BlockCosts
from hf_efficient_attn.layout.call import AttentionCall

# queries per block of the kernel that multiplies, normalises and multiplies
EXPLICIT_BLOCK_TOKENS = 64


@dataclass(frozen=True)
class PassCosts:
    """Times of one score in a forward or a backward pass, in scores of dense attention without a mask in that pass.

    Attributes:
        blocks: of torch's fused kernel for CPUs, as blocked calls it, by the length of the blocks of queries.
        explicit: of the kernel that multiplies, normalises and multiplies: caps, terms, dropout, other devices.
        masked: of dense attention with a mask.
        is_widened: whether bfloat16 is computed in float32, which takes less time where a processor has no instructions
            for it: by blocked and gathered, and by sdpa in both passes if it is so in the backward pass.
    """

    blocks: BlockCosts
    explicit: float
    masked: float
    is_widened: bool = False

    def of_kernel(self, is_fused: bool) -> BlockCosts:
        """Return the costs of the kernel that computes blocks of queries, by their length."""
        return self.blocks if is_fused else BlockCosts.only(EXPLICIT_BLOCK_TOKENS, self.explicit)

    def fast_dtype(self, dtype: torch.dtype, device: str) -> torch.dtype:
        """Return the dtype in which a type of device computes: float16 takes five times as long as float32 on CPUs."""
        is_slow = (dtype == torch.float16 and device == "cpu") or (dtype == torch.bfloat16 and self.is_widened)
        return torch.float32 if is_slow else dtype

    def in_fast_dtype(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors, all of one dtype, in that in which they are computed."""
        dtype = self.fast_dtype(tensors[0].dtype, tensors[0].device.type)
        return tuple(tensor.to(dtype) for tensor in tensors)


@dataclass(frozen=True)
class Costs:
    """What attention in one dtype costs on a machine.

    Attributes:
        dense_backward: time of a score in the backward pass over that in the forward pass, in dense attention.
        key: time to read a key for a single query, in scores of a forward pass, as all that follow.
        gathered: time to copy a key and its value to their place in a block.
        call: fixed time of a call that is computed in blocks.
        run: fixed time of one of its kernels, with what surrounds it.
        moved: time of a query that is moved to its place in a token order and back.
        flex: time of a score in flex's kernel, forward and backward alike.
        flex_call: fixed time of a call of flex beyond that of dense attention.
        tile_key: time of a key of a tile of chosen keys, besides that of its scores: it is gathered, and read from
            memory several times.
        listed: time of a pair that a list of chosen keys names, to find its tile and to make its mask.
    """

    forward: PassCosts
    backward: PassCosts
    dense_backward: float
    key: float
    gathered: float
    call: float
    run: float
    moved: float
    flex: float = 1.2
    flex_call: float = 0.0
    tile_key: float = 80.0
    listed: float = 5.0

    def shares(self, needs_grad: bool) -> tuple[tuple[PassCosts, float], ...]:
        """Return the passes of a call, and their shares in the time of a score of dense attention."""
        if not needs_grad:
            return ((self.forward, 1.0),)
        both = 1.0 + self.dense_backward
        return (self.forward, 1.0 / both), (self.backward, self.dense_backward / both)

    def masked(self, needs_grad: bool) -> float:
        """Return the time of a score of dense attention with a mask."""
        return sum(share * each.masked for each, share in self.shares(needs_grad))


def dtype_of_kernel(call: AttentionCall) -> torch.dtype:
    """Return the dtype whose costs a call has: float16 is computed in float32, and float64 compared within itself."""
    return torch.bfloat16 if call.inputs.dtype == torch.bfloat16 else torch.float32
