"""torch's dense attention: over all keys, or over several intervals of them that one softmax joins."""

from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hf_efficient_attn.backends.alignment import aligned
from hf_efficient_attn.backends.fused_cpu import fused_attention, plain_rows, repeated_row
from hf_efficient_attn.patterns.intervals import Intervals


def joined(
    q: Tensor, k: Tensor, v: Tensor, intervals: Intervals, mask: Tensor | None, scale: float, need_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Return output, and lse if needed, over several intervals of the keys, read where they are; without gradients."""
    outs, lses, first = [], [], 0
    for start, stop in intervals:
        part = None if mask is None else mask[..., first : first + stop - start]
        first += stop - start
        out, part_lse = fused(q, k[:, :, start:stop], v[:, :, start:stop], part, False, scale, 0.0, need_lse=True)
        # a kernel that reads them without a copy returns their lse, too: 0 of rows that read none
        lse = cast(Tensor, part_lse)
        outs.append(out.to(lse.dtype))
        lses.append(lse if part is None else lse.masked_fill((part == -torch.inf).all(-1), -torch.inf))
    total = torch.stack(lses)
    out = (torch.stack(outs) * total.softmax(0)[..., None]).sum(0)
    return out.to(q.dtype), total.logsumexp(0) if need_lse else None


def fused(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float, dropout: float, need_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the output, and lse if it is needed and the kernel returns it."""
    # without a mask every kernel supports grouped key heads; with one, some fall back to a slow path
    heads_per_key_head = q.shape[1] // k.shape[1]
    if heads_per_key_head > 1 and q.shape[2] == 1:
        # single queries of heads that share keys are as the queries of one head
        by_key_head = (k.shape[1], heads_per_key_head)
        if mask is not None and mask.shape[1] > 1:
            mask = mask.reshape(mask.shape[0], *by_key_head, mask.shape[3])
        shared = q.reshape(q.shape[0], *by_key_head, q.shape[3])
        out, lse = fused(shared, k, v, mask, False, scale, dropout, need_lse)
        return out.reshape(*q.shape[:3], v.shape[3]), None if lse is None else lse.reshape(q.shape[:3])
    if heads_per_key_head > 1 and (mask is not None or need_lse):
        k, v = (each.repeat_interleave(heads_per_key_head, 1) for each in (k, v))
    if q.device.type == "cpu":
        q, k, v = plain_rows(q, k, v)
    elif not torch.compiler.is_compiling():
        q, k, v = aligned(q, k, v)
        if mask is not None and mask.requires_grad and not (q.requires_grad or k.requires_grad or v.requires_grad):
            # otherwise the kernel keeps no log-sum-exp, without which the gradient of its mask fails
            q = q.detach().requires_grad_()
    gives_lse = q.device.type == "cpu" and not dropout and q.shape[-1] == v.shape[-1]
    if need_lse and gives_lse and not (mask is not None and mask.requires_grad):
        return fused_attention(q, k, v, mask, scale, is_causal)
    rows = repeated_row(q)
    out = scaled_dot_product_attention(
        rows, k, v, mask, dropout, is_causal, scale=scale, enable_gqa=bool(q.shape[1] != k.shape[1])
    )
    return out if rows is q else out[:, :, :1], None
