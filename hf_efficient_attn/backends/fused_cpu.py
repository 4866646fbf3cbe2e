"""The fused operator behind torch's SDPA on CPUs, which torch keeps to itself: what it assumes, said in one place.

It checks nothing. It takes the numbers of a row to be contiguous, whatever the stride of the last dimension says, and
otherwise reads foreign memory. Where rows overlap, its backward pass fails in half precision. Its output has the memory
order of q, and is written to wrong places if examples, heads or tokens of q lie closer together than a row is wide.
`plain_rows` makes inputs that it computes correctly; so are views of these that do not cut their rows, such as
overlapping blocks of keys. With `is_causal` it scales after it has masked, so the scale must be greater than 0.
"""

import torch
from torch import Tensor


def plain_rows(q: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors [batch, heads, tokens, width] as the operator may read them, by copies if need be.

    Examples, heads and tokens may have any memory order. Except in q, examples and heads may also overlap or be
    expanded.
    """
    if not torch.compiler.is_compiling() and q.is_contiguous() and all(each.is_contiguous() for each in others):
        return (q, *others)
    # strides first: a compiler would keep every comparison of a size
    is_close = any(stride < q.shape[3] and size > 1 for size, stride in zip(q.shape[:3], q.stride(), strict=False))
    q = q.clone(memory_format=torch.contiguous_format) if is_close else q
    return tuple(tensor if has_plain_rows(tensor) else tensor.contiguous() for tensor in (q, *others))


def repeated_row(q: Tensor) -> Tensor:
    """Return queries as they are, but a single one of bfloat16 on a CPU twice, for the first row of the output.

    Products of matrices with one vector of bfloat16 take three times as long as with two.
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
        lse: +inf for rows whose weights are 0, masked or not.
    """
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return kernel(grad, q, k, v, out, lse, 0.0, is_causal, attn_mask=mask, scale=scale)  # type: ignore[no-any-return]
