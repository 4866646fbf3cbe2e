"""Sums over processes, and what is largest among them."""

from typing import Any

import torch
from torch import Tensor, distributed


class SumOfProcesses(torch.autograd.Function):
    """The sum of a tensor over processes. Each of them computes with it, and gets the sum of their gradients."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return summed(own, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return summed(gradient, ctx.group), None


def summed(own: Tensor, group: Any) -> Tensor:
    """Return the sum over processes."""
    total = own.detach().clone()
    distributed.all_reduce(total, group=group)
    return total


def largest(own: Tensor, group: Any) -> Tensor:
    """Return the largest of the numbers of all processes, each of a tensor by itself; without a gradient."""
    found = own.detach().clone()
    distributed.all_reduce(found, distributed.ReduceOp.MAX, group=group)
    return found
