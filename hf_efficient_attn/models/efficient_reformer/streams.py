"""The two streams of reversible layers on their way from layer to layer, which mixed precision must not narrow.

FSDP's mixed precision casts every tensor among the arguments of a wrapped layer to the dtype of its weights. Streams in
bfloat16 cannot be computed again: the backward pass would see others than the forward pass did. So both travel in one
object, which is neither a tensor nor a container that FSDP opens, as dataclasses are. FSDP also shares out a layer's
gradients when that of its arguments is known: for this there is a tensor without elements beside the streams.
"""

from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.errors import EfficientAttentionError


class Streams:
    """What a layer reads: two streams [B, T, hidden_size], of which its MLP writes the second."""

    def __init__(self, first: Tensor, second: Tensor) -> None:
        self.first, self.second = first, second

    def to(self, *args: Any, **kwargs: Any) -> "Streams":
        """Return both on a device, where layers lie on several."""
        return Streams(self.first.to(*args, **kwargs), self.second.to(*args, **kwargs))

    def mark(self) -> Tensor | None:
        """Return a tensor without elements that has a gradient where the streams have one; None while compiling."""
        if torch.compiler.is_compiling():
            return None
        return self.second.new_zeros(0).requires_grad_(self.second.requires_grad)

    def opened(self, recorded: Tensor, mark: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return both streams; the gradient of `mark` is known once that of the second is.

        recorded: the first stream, as the layer has got it beside them; FSDP may have narrowed it.

        Raises:
            EfficientAttentionError: it has other contents.
        """
        if recorded is not self.first and _differ(recorded, self.first):
            raise EfficientAttentionError(
                "A hook has put another tensor in place of `states`, which a layer of a Reformer only records: it "
                "reads `streams`. Change what the layer before returns, or the embeddings, by a forward hook instead."
            )
        if mark is None or not mark.requires_grad:
            return self.first, self.second
        return self.first, _Marked.apply(self.second, mark)


def _differ(one: Tensor, other: Tensor) -> bool:
    if (one.dtype, one.device) != (other.dtype, other.device):
        return False
    return one.data_ptr() != other.data_ptr()


class _Marked(torch.autograd.Function):
    """A tensor as it is, and a gradient for another that comes after its own."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, mark: Tensor) -> Tensor:
        ctx.mark = (mark.shape, mark.dtype)
        return states.view_as(states)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        shape, dtype = ctx.mark
        return grads[0], grads[0].new_zeros(shape, dtype=dtype)
