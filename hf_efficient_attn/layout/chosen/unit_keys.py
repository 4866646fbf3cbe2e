"""Keys that are read at length 1, as the queries that a Reformer takes for keys."""

from typing import Any

import torch
from torch import Tensor

# added to the mean square of a key before the root, as in the authors' code
KEY_EPS = 1e-6


def unit(vectors: Tensor) -> Tensor:
    """Return vectors of length 1 in their dtype, computed in float32 at least; vectors near 0 stay shorter."""
    wide = vectors.to(torch.promote_types(vectors.dtype, torch.float32))
    if torch.compiler.is_compiling():
        # a compiler joins the operations of the gradient by itself
        return (wide * _factor(wide)).to(vectors.dtype)
    return _Unit.apply(wide).to(vectors.dtype)


def _factor(vectors: Tensor) -> Tensor:
    """Return what makes vectors [..., D] one long, [..., 1]."""
    # the norm reads them once, and writes no squares
    square = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True).square()
    return (square + KEY_EPS * vectors.shape[-1]).rsqrt()


class _Unit(torch.autograd.Function):
    """The product of vectors and their factor, with its gradient in one formula: autograd takes twice as long."""

    @staticmethod
    def forward(vectors: Tensor) -> Tensor:
        return vectors * _factor(vectors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (vectors,) = ctx.saved_tensors
        return unit_gradient(vectors, grad)


def unit_gradient(vectors: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of vectors, given that of `unit(vectors)`, in float32 or float64 as both are.

    With u = f(x) · x and f = (‖x‖² + ε)^-½, that of x is f · (g − f² · (g · x) · x).
    """
    factor = _factor(vectors)
    along = (grad * vectors).sum(-1, keepdim=True) * factor.square()
    return torch.addcmul(grad, vectors, along, value=-1).mul_(factor)
