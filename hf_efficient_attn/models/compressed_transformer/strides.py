"""Texts cut into strides of so many tokens, and convolutions that make one slot of each stride."""

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from hf_efficient_attn.layout.tracing import is_exporting


class StrideConvolution(nn.Conv1d):
    """A convolution whose kernels are as long as its stride, [R, C, S · stride] → [R, C, S].

    Computed as a product of matrices, which torch compiles and exports for any length, and its convolutions not.
    """

    def forward(self, states: Tensor) -> Tensor:
        """Return the slots of texts."""
        made = convolved(states.mT, self.weight.unflatten(0, (self.groups, -1)))
        # adapters build convolutions of this class without one
        if self.bias is not None:
            made = made + self.bias.to(made.dtype)
        return made.mT


def convolved(states: Tensor, weight: Tensor) -> Tensor:
    """Return one slot for each stride, [R, S · stride, H · D] → [R, S, H · O].

    weight: [O, D, stride], for each of H heads, or [H, O, D, stride].
    """
    windows = by_strides(states, weight.shape[-1]).unflatten(3, (-1, weight.shape[-2]))
    if not torch.compiler.is_compiling():
        letters = "odt" if weight.ndim == 3 else "hodt"
        return torch.einsum(f"rsthd,{letters}->rsho", windows, weight).flatten(2)
    # this makes texts and strides one axis, of which an exporter cannot prove that it is longer than that of texts, and
    # a gradient in which the compiler takes one stride for contiguous
    kernels = weight.mT.flatten(-2).mT.expand(windows.shape[3], -1, -1)
    made = [own.flatten(2) @ kernel.unsqueeze(0) for own, kernel in zip(windows.unbind(3), kernels, strict=True)]
    return torch.cat(made, 2)


def whole_strides(states: Tensor, stride: int) -> Tensor:
    """Return states with zeros behind them that fill up the last stride, [R, L, X] → [R, S · stride, X]."""
    num_strides = (states.shape[1] + stride - 1) // stride
    return pad(states, (0, 0, 0, num_strides * stride - states.shape[1]))


def by_strides(states: Tensor, stride: int) -> Tensor:
    """Return states cut into strides, [R, S · stride, X] → [R, S, stride, X]."""
    return states.unflatten(1, (states.shape[1] // stride, stride))


def filled_slots(real: Tensor | None, stride: int) -> Tensor | None:
    """Return which strides hold tokens of a text, bool [R, S]; None: all."""
    if real is None:
        return None
    return by_strides(whole_strides(real.unsqueeze(-1).int(), stride), stride).amax((2, 3)) > 0


def with_spare_stride(states: list[Tensor], real: Tensor | None, stride: int) -> tuple[list[Tensor], Tensor | None]:
    """Return texts, [R, L, X] each, and which of their tokens are real; exported, with a stride of padding behind them.

    Without it, an exporter refuses lengths from one stride on: it takes one for a special case.
    """
    if not is_exporting():
        return states, real
    if real is None:
        real = torch.ones(states[0].shape[:2], dtype=torch.bool, device=states[0].device)
    return [pad(each, (0, 0, 0, stride)) for each in states], pad(real, (0, stride))
