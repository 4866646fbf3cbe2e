"""Attention of one run: blocks of queries [heads, blocks, queries, head_dim] with keys of their own.

Two kernels of one contract. `FusedCPU` is the operator behind torch's SDPA on CPUs, which takes overlapping blocks of
keys as strided views, so that nothing is copied. `Explicit` is matmul, softmax, matmul: on any device, with dropout and
learned terms, and with every intermediate of one run in memory.

Backward passes get the output and the log-sum-exp of the whole row, not those of the run: the weights they rebuild are
then those of the whole softmax, and the gradients of the runs add up.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp

import torch
from torch import Tensor

from hf_efficient_attn.backends.fused_cpu import fused_attention, fused_attention_backward
from hf_efficient_attn.layout.sinks import cap

# e to this power is no denormal number, and far below the rounding of 1 in float64
LOWEST_SCORE = -80.0
FUSED_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class FusedCPU:
    """The fused operator of torch on CPUs. Takes no dropout and no learned terms; values as wide as keys."""

    scale: float

    def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the output [h, n, q, d] and the log-sum-exp [h, n, q] of each row over the keys of its block.

        A row whose bias is all -inf has output 0 and log-sum-exp 0.
        """
        return fused_attention(q, k, v, mask_of(bias, q.dtype), self.scale)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v; `out` and `lse` are those of the whole rows, see `lse_of_weights`."""
        return fused_attention_backward(grad, q, k, v, out, lse, mask_of(bias, q.dtype), self.scale)


def mask_of(bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a bias as the mask of the fused operator, which reads masks of float64 inputs as float64 unasked."""
    return None if bias is None else bias[None].to(wide_dtype(dtype))


@dataclass(frozen=True)
class Explicit:
    """Matmul, softmax, matmul.

    Half-precision operands are widened before each product, on GPUs, too, since scores rounded to half precision are
    wrong by parts of a weight where they are large. There `torch.bmm(..., out_dtype=torch.float32)` would not round
    them; it exists on CUDA only, and was not measured.

    Attributes:
        terms: the learned parts of the scores of this run, which broadcast to [h, n, q, k].
        drop: draws which weights of a shape are dropped, a bool tensor; None: none.
        dropout: probability with which `drop` drops.
        softcap: bound of the scaled scores, before terms are added.
    """

    scale: float
    terms: Sequence[Tensor] = ()
    drop: Callable[[tuple[int, ...]], Tensor] | None = None
    dropout: float = 0.0
    softcap: float | None = None

    def products(self, q: Tensor, k: Tensor) -> Tensor:
        """Return the scaled products of queries and keys [h, n, q, k], in float32 or float64, capped."""
        return cap(torch.matmul(wide(q) * self.scale, wide(k).transpose(-1, -2)), self.softcap)

    def scores(self, q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
        """Return the scores [h, n, q, k], in float32 or float64."""
        scores = self.products(q, k)
        for term in self.terms:
            scores += term
        return scores if bias is None else scores.add_(bias)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the output [h, n, q, d] and the log-sum-exp [h, n, q] of each row over the keys of its block.

        A row whose bias is all -inf has output 0 and log-sum-exp -inf.
        """
        scores = self.scores(q, k, bias)
        largest = finite(scores.amax(-1, keepdim=True))
        weights = exp_(scores.sub_(largest))
        total = weights.sum(-1, keepdim=True)
        if self.drop is not None:
            weights.masked_fill_(self.drop(weights.shape), 0.0)
        # a row without keys has only zeros to divide
        out = torch.matmul(weights, wide(v)).div_(total.clamp(min=torch.finfo(total.dtype).tiny) * (1 - self.dropout))
        return out, total.log_().add_(largest).squeeze_(-1)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the gradients of q, k, v and the scores; `out` and `lse` as for `FusedCPU`."""
        weights = exp_(self.scores(q, k, bias).sub_(lse[..., None]))
        grad = wide(grad)
        delta = (grad * wide(out)).sum(-1, keepdim=True)
        kept, d_weights = weights, torch.matmul(grad, wide(v).transpose(-1, -2))
        if self.drop is not None:
            # the draw of the forward pass, and its scale
            dropped = self.drop(weights.shape)
            kept, d_weights = weights.masked_fill(dropped, 0.0), d_weights.masked_fill_(dropped, 0.0)
            d_weights.div_(1 - self.dropout)
            grad = grad / (1 - self.dropout)
        dv = torch.matmul(kept.transpose(-1, -2), grad)
        d_scores = d_weights.sub_(delta).mul_(weights)
        d_products = d_scores
        if self.softcap is not None:
            d_products = d_scores * (1 - (self.products(q, k) / self.softcap).square_())
        dq = torch.matmul(d_products, wide(k)) * self.scale
        dk = torch.matmul(d_products.transpose(-1, -2), wide(q)) * self.scale
        return dq, dk, dv, d_scores


def exp_(scores: Tensor) -> Tensor:
    """Return exp(scores) in their place, with 0 for what no sum with a weight near 1 would show.

    On CPUs the exponential of -inf takes five times as long as others, and one that is all but 0 thirty times.
    """
    return torch.threshold_(scores.clamp_(min=LOWEST_SCORE).exp_(), 2 * exp(LOWEST_SCORE), 0.0)


def wide(tensor: Tensor) -> Tensor:
    """Return the tensor in float32, or as it is in float64."""
    return tensor.to(wide_dtype(tensor.dtype))


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which softmax and log-sum-exp are computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def finite(lse: Tensor) -> Tensor:
    """Return the log-sum-exp with 0 for the rows that have no key, so that their weights come out as 0 and not NaN."""
    return lse.masked_fill(lse == float("-inf"), 0.0)


def lse_of_weights(lse: Tensor) -> Tensor:
    """Return the log-sum-exp from which exp(score - lse) is the weight of every pair: +inf where all weights are 0.

    Such rows are not only those without keys, whose scores are -inf: those of masked tokens have scores of any size.
    """
    return lse.masked_fill(lse == float("-inf"), float("inf"))
