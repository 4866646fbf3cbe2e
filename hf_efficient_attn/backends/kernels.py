"""Attention of one run: blocks of queries [heads, blocks, queries, head_dim], each with its own keys.

Two kernels have the same interface. `FusedCPU` is the operator behind torch's SDPA on CPUs, which takes overlapping
blocks of keys as strided views, so that nothing is copied. `Explicit` is matmul, softmax, matmul: it runs on any
device, with dropout and learned terms, and keeps every intermediate of one run in memory.

Backward passes get the output and the log-sum-exp of the whole row, not those of the run. The weights that they
recompute are then those of the whole softmax, and the gradients of the runs add up.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_efficient_attn.layout.call import AttentionCall, cap

# The fused operator behind torch's SDPA on CPUs is private to torch. This is what it assumes.
#
# It checks nothing. It assumes that the elements of a row are contiguous, whatever the stride of the last dimension is,
# and otherwise reads memory outside the tensor. If rows overlap, its backward pass fails in half precision. Its output
# has the memory order of q, and is written to wrong places if the stride of q's examples, heads or tokens is less than
# the width of a row. `plain_rows` makes inputs that it computes correctly. It is also correct for views of these that
# keep rows whole, such as overlapping blocks of keys. With `is_causal` it scales after masking, so the scale must be
# greater than 0.


def plain_rows(q: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors [batch, heads, tokens, width], copied where the operator could not read them correctly.

    Examples, heads and tokens may have any memory order. Except in q, examples and heads may also overlap or be
    expanded.
    """
    if not torch.compiler.is_compiling() and q.is_contiguous() and all(each.is_contiguous() for each in others):
        return (q, *others)
    # compare strides first: a compiler adds a guard for every comparison of a size
    is_close = any(stride < q.shape[3] and size > 1 for size, stride in zip(q.shape[:3], q.stride(), strict=False))
    q = q.clone(memory_format=torch.contiguous_format) if is_close else q
    return tuple(tensor if has_plain_rows(tensor) else tensor.contiguous() for tensor in (q, *others))


def repeated_row(q: Tensor) -> Tensor:
    """Return q; a single query in bfloat16 on a CPU is repeated, and the caller takes the first row of the output.

    Products of a matrix and one bfloat16 vector take three times as long as with two vectors.
    """
    if torch.compiler.is_compiling() or q.shape[2] > 1 or q.dtype != torch.bfloat16 or q.device.type != "cpu":
        return q
    return q.repeat(1, 1, 2, 1)


def has_plain_rows(tensor: Tensor) -> bool:
    """Return whether the last dimension is contiguous, and no two rows overlap."""
    tokens, width = tensor.shape[-2:]
    token_stride, stride = tensor.stride()[-2:]
    return (stride == 1 or width == 1) and (token_stride >= width or tokens == 1)


def fused_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, is_causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the output [b, h, q, d], differentiable, and the log-sum-exp [b, h, q]; all inputs have plain rows.

    Args:
        mask: added to the scores; broadcasts to [b, h, q, k]. float64 for float64 inputs, otherwise float32 or the
            inputs' dtype. A row of -inf gets output 0 and log-sum-exp 0.
    """
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    rows = repeated_row(q)
    out, lse = kernel(rows, k, v, 0.0, is_causal, attn_mask=mask, scale=scale)
    return (out, lse) if rows is q else (out[:, :, :1], lse[:, :, :1])


def fused_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    scale: float,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v; all tensors, `grad` and `out` included, have plain rows.

    Args:
        lse: the log-sum-exp [b, h, q]; +inf for rows whose weights shall be 0, whatever the mask is.
    """
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return kernel(grad, q, k, v, out, lse, 0.0, is_causal, attn_mask=mask, scale=scale)  # type: ignore[no-any-return]


# exp(LOWEST_SCORE) is far below the rounding error of 1 in float64, but its product with a gradient of 1e-16 is not yet
# a denormal number in float32: products of matrices with many denormal numbers take at least ten times as long
LOWEST_SCORE = -50.0
# used with sinks: if a sink has most of a row's weight, all other weights are small, but the gradients depend on them
LOWEST_BESIDE_SINKS = -80.0
FUSED_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# queries per strip of a causal triangle. torch's operator computes the whole square of a triangle that is not larger
# than its blocks; a strip gets only the keys up to its last query
STRIP_TOKENS = 128


@dataclass(frozen=True)
class FusedCPU:
    """The fused operator of torch on CPUs, without dropout and learned terms, for values as wide as keys.

    Attributes:
        is_causal: whether query i attends to the keys 0 … i of its block; there is no bias, and the scale is above 0.
    """

    scale: float
    is_causal: bool = False

    def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the output [h, n, q, d] and the log-sum-exp [h, n, q] of each row over the keys of its block.

        A row whose bias is all -inf has output 0 and log-sum-exp 0.
        """
        if not self.has_strips(q):
            return fused_attention(q, k, v, mask_of(bias, q.dtype), self.scale, self.is_causal)
        found = [
            fused_attention(q[:, :, rows], k[:, :, : rows.stop], v[:, :, : rows.stop], mask, self.scale)
            for rows, mask in strips(q)
        ]
        return torch.cat([out for out, _ in found], 2), torch.cat([lse for _, lse in found], 2)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v; `out` and `lse` are those of the whole rows, see `lse_of_weights`."""
        if not self.has_strips(q):
            mask = mask_of(bias, q.dtype)
            return fused_attention_backward(grad, q, k, v, out, lse, mask, self.scale, self.is_causal)
        dq = torch.empty_like(q, memory_format=torch.contiguous_format)
        dk, dv = (torch.zeros(each.shape, dtype=wide_dtype(each.dtype)) for each in (k, v))
        for rows, mask in strips(q):
            d_rows, queries, outs = (each[:, :, rows] for each in (grad, q, out))
            keys, values = (each[:, :, : rows.stop] for each in (k, v))
            sums = lse[:, :, rows].contiguous()
            found = fused_attention_backward(d_rows, queries, keys, values, outs, sums, mask, self.scale)
            dq[:, :, rows] = found[0]
            dk[:, :, : rows.stop] += found[1]
            dv[:, :, : rows.stop] += found[2]
        return dq, dk, dv

    def has_strips(self, q: Tensor) -> bool:
        """Return whether a causal triangle is computed in strips."""
        return self.is_causal and q.shape[2] > STRIP_TOKENS


def strips(q: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield the queries of each strip of a causal triangle, and its mask over the keys up to the last query."""
    num_queries = q.shape[2]
    for start in range(0, num_queries, STRIP_TOKENS):
        stop = min(start + STRIP_TOKENS, num_queries)
        mask = torch.full((stop - start, stop), -torch.inf, dtype=wide_dtype(q.dtype)).triu_(start + 1)
        yield slice(start, stop), mask[None, None]


def mask_of(bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a bias as the mask of the fused operator, which reads any mask of float64 inputs as float64."""
    if bias is None:
        return None
    return (bias if bias.ndim == 4 else bias[None]).to(wide_dtype(dtype))


@dataclass(frozen=True)
class Explicit:
    """Matmul, softmax, matmul.

    Half-precision operands are widened before each product, also on GPUs, because rounding large scores to half
    precision changes the weights visibly. `torch.bmm(..., out_dtype=torch.float32)` would not round them, but exists
    only on CUDA and was not measured.

    Attributes:
        terms: the learned parts of the scores of this run, which broadcast to [h, n, q, k].
        drop: draws which weights are dropped, as a bool tensor of a given shape; None: no dropout.
        dropout: probability with which `drop` drops.
        softcap: bound of the scaled scores, before terms are added.
        has_sinks: whether sinks take weight from the keys.
    """

    scale: float
    terms: Sequence[Tensor] = ()
    drop: Callable[[tuple[int, ...]], Tensor] | None = None
    dropout: float = 0.0
    softcap: float | None = None
    has_sinks: bool = False

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
        # the weights of a row without keys are all 0, and so is their sum
        out = torch.matmul(weights, wide(v)).div_(total.clamp(min=torch.finfo(total.dtype).tiny) * (1 - self.dropout))
        return out, total.log_().add_(largest).squeeze_(-1)

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        bias: Tensor | None,
        delta: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the gradients of q, k, v and the scores; `out` and `lse` as for `FusedCPU`.

        delta: the sum of `grad` · `out` over d, less the gradient of the log-sum-exp, [h, n, q]; None: the latter is 0.
        """
        lowest = LOWEST_BESIDE_SINKS if self.has_sinks else LOWEST_SCORE
        weights = exp_(self.scores(q, k, bias).sub_(lse[..., None]), lowest)
        grad = wide(grad)
        delta = (grad * wide(out)).sum(-1) if delta is None else delta
        kept, d_weights = weights, torch.matmul(grad, wide(v).transpose(-1, -2))
        if self.drop is not None:
            # drop the same weights as the forward pass, and scale the others as it does
            dropped = self.drop(weights.shape)
            kept, d_weights = weights.masked_fill(dropped, 0.0), d_weights.masked_fill_(dropped, 0.0)
            d_weights.div_(1 - self.dropout)
            grad = grad / (1 - self.dropout)
        dv = torch.matmul(kept.transpose(-1, -2), grad)
        d_scores = d_weights.sub_(delta[..., None]).mul_(weights)
        d_products = d_scores
        if self.softcap is not None:
            d_products = d_scores * (1 - (self.products(q, k) / self.softcap).square_())
        dq = torch.matmul(d_products, wide(k)) * self.scale
        dk = torch.matmul(d_products.transpose(-1, -2), wide(q)) * self.scale
        return dq, dk, dv, d_scores


def is_fused(call: AttentionCall) -> bool:
    """Return whether the fused operator can compute a call."""
    inputs = call.inputs
    is_plain = not call.terms and call.softcap is None and call.dropout == 0.0 and inputs.head_dim == inputs.value_dim
    return is_plain and inputs.device == "cpu" and inputs.dtype in FUSED_DTYPES


def dropper(dropout: float, seed: int, device: torch.device) -> Callable[[tuple[int, ...]], Tensor] | None:
    """Return a function that draws which weights are dropped, the same ones for the same seed; None: no dropout.

    Each random number of 64 bits decides on four weights, so the probability is exact to 1 in 65,536.
    """
    if dropout == 0.0:
        return None
    limit = round(dropout * 2**16) - 2**15

    def draw(shape: tuple[int, ...]) -> Tensor:
        generator = torch.Generator(device).manual_seed(seed)
        size = math.prod(shape)
        drawn = torch.empty(-(-size // 4), dtype=torch.int64, device=device)
        drawn.random_(-(2**63), None, generator=generator)
        return (drawn.view(torch.int16)[:size] < limit).view(shape)

    return draw


def sink_gradient(sinks: Tensor, grad: Tensor, out: Tensor, lse: Tensor, delta: Tensor | None = None) -> Tensor:
    """Return the gradient of the sinks [H]; a sink takes weight from the keys and has no value. delta: [B, H, Nq]."""
    delta = (grad.to(lse.dtype) * out).sum(-1) if delta is None else delta
    weights = torch.exp(sinks.to(lse.dtype)[:, None] - lse)
    return -(weights * delta).sum((0, 2)).to(sinks.dtype)


def empty_output(q: Tensor, v: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an uninitialised output, in the memory order of q if the widths agree."""
    if q.shape[-1] == v.shape[-1]:
        return torch.empty_like(q, dtype=dtype)
    return q.new_empty(*q.shape[:-1], v.shape[-1], dtype=dtype)


def exp_(scores: Tensor, lowest: float = LOWEST_SCORE) -> Tensor:
    """Replace scores by exp(scores), with 0 where a weight is too small to change a sum of about 1.

    On CPUs, exp(-inf) takes five times as long as exp of other values, and a result that is nearly 0 thirty times.
    """
    return torch.threshold_(scores.clamp_(min=lowest).exp_(), 2 * math.exp(lowest), 0.0)


def wide(tensor: Tensor) -> Tensor:
    """Return the tensor in float32, or as it is in float64."""
    return tensor.to(wide_dtype(tensor.dtype))


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which softmax and log-sum-exp are computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def finite(lse: Tensor) -> Tensor:
    """Return the log-sum-exp with 0 for rows without keys, so that their weights become 0 and not NaN."""
    return lse.masked_fill(lse == float("-inf"), 0.0)


def lse_of_weights(lse: Tensor) -> Tensor:
    """Return the log-sum-exp from which exp(score - lse) is the weight of every pair: +inf if all weights are 0.

    These are the rows without keys, whose scores are -inf, and those of masked tokens, whose scores may be anything.
    """
    return lse.masked_fill(lse == float("-inf"), float("inf"))


# What torch's memory-efficient attention on GPUs assumes about its inputs without checking it.


# what the kernel loads at once
BYTES = 16


def aligned(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors [batch, heads, tokens, width], copied where the kernel could not read them."""
    return tuple(tensor if is_aligned(tensor) else tensor.contiguous() for tensor in tensors)


def is_aligned(tensor: Tensor) -> bool:
    """Return whether rows are contiguous and, if the storage is aligned, start at multiples of `BYTES`.

    >>> import torch
    >>> is_aligned(torch.empty(2, 8, 10, 16).transpose(1, 2)), is_aligned(torch.empty(2, 8, 10, 17)[..., :16])
    (True, False)
    """
    *strides, stride = tensor.stride()
    if stride != 1 or tensor.storage_offset() * tensor.element_size() % BYTES:
        return False
    is_multiple = (
        size == 1 or each * tensor.element_size() % BYTES == 0
        for size, each in zip(tensor.shape, strides, strict=False)
    )
    return all(is_multiple)
