"""Attention by torch's scaled_dot_product_attention over all pairs: the fastest for full, causal and short patterns."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hf_efficient_attn.backends.fused_cpu import fused_attention, plain_rows
from hf_efficient_attn.layout.cache import cached
from hf_efficient_attn.layout.dense import additive_mask, is_idle, num_mask_bytes, row_lse, term_bias
from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.layout.request import Request
from hf_efficient_attn.layout.terms import Term
from hf_efficient_attn.layout.token_mask import TokenMask

NAME = "sdpa"
# memory of a pair: bools while its mask is made, label and score of a term, score and weight without a fused kernel
BOOLS_PER_MASKED_PAIR = 2
BYTES_PER_BIAS = 16
NUMBERS_PER_SCORE = 3


def why_not(request: Request) -> str | None:
    """Return None: everything can be computed this way, given the memory for all pairs."""
    return None


def num_pair_bytes(request: Request) -> int:
    """Return about how many bytes a request needs that grow with the number of pairs; 0: only inputs and outputs.

    They are the mask, the biases of terms, and all scores where torch has no fused kernel for the request.
    """
    layout = request.layout
    has_mask = request.has_token_mask or request.has_terms or maskless(layout) is None
    num_examples = request.batch_size if request.has_token_mask else 1
    num_bytes = num_mask_bytes(layout, num_examples, request.dtype.itemsize + BOOLS_PER_MASKED_PAIR) if has_mask else 0
    num_scores = layout.num_heads * layout.num_queries * layout.num_keys
    if request.has_terms:
        num_bytes += BYTES_PER_BIAS * num_examples * num_scores
    # its kernel for CPUs knows no dropout, no values of another width, and no gradient of a mask
    has_unfused = request.dropout > 0.0 or request.head_dim != request.value_dim
    if request.device == "cpu" and (has_unfused or (request.has_terms and request.needs_grad)):
        num_bytes += NUMBERS_PER_SCORE * max(4, request.dtype.itemsize) * request.batch_size * num_scores
    return num_bytes


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    tokens: TokenMask,
    terms: Sequence[Term],
    scale: float,
    dropout: float,
    need_lse: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Return the output [batch, heads, queries, value_dim] and each row's lse [batch, heads, queries].

    Arguments as for the reference backend.
    """
    plain = None if terms or not is_idle(tokens) else maskless(layout)
    mask: Tensor | None = None
    keyless: Tensor | None = None
    is_causal = False
    keys, values = k, v
    if plain is not None:
        start, stop, is_causal = plain
        keys, values = k[:, :, start:stop], v[:, :, start:stop]
    else:
        mask, keyless = additive_mask(layout, tokens, q.shape[0], q.device, q.dtype)
        bias = term_bias(terms, layout, tokens, q.device)
        if bias is not None:
            mask = (bias if mask is None else bias + mask).to(q.dtype)
            # a term may leave a row without keys
            closed = (mask == -torch.inf).all(-1, keepdim=True)
            mask = mask.masked_fill(closed, 0.0)
            keyless = closed if keyless is None else closed | keyless
    if is_causal and scale <= 0.0:
        # kernels close the causal triangle by -inf before they scale, and -inf times such a number is no mask
        q, scale = q * scale, 1.0
    # large numbers of masked tokens would overflow in the backward pass, which computes their rows, too
    readers = q if keyless is None else q.masked_fill(keyless, 0)
    out, lse = _fused(readers, keys, values, mask, is_causal, scale, dropout, need_lse)
    if need_lse and lse is None:
        lse = row_lse(q, k, layout, tokens, terms, scale)
    if keyless is not None:
        out = out.masked_fill(keyless, 0)
        lse = None if lse is None else lse.masked_fill(keyless[..., 0], -torch.inf)
    return out, lse


def _fused(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float, dropout: float, need_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the output, and lse where it is needed and the kernel gives it."""
    # without a mask every kernel shares key heads by itself; with one, some fall back to the slow form
    if mask is not None or need_lse:
        heads_per_key_head = q.shape[1] // k.shape[1]
        k, v = (each.repeat_interleave(heads_per_key_head, 1) if heads_per_key_head > 1 else each for each in (k, v))
    if q.device.type == "cpu":
        q, k, v = plain_rows(q, k, v)
    gives_lse = q.device.type == "cpu" and not dropout and q.shape[-1] == v.shape[-1]
    if need_lse and gives_lse and not (mask is not None and mask.requires_grad):
        return fused_attention(q, k, v, mask, scale, is_causal)
    out = scaled_dot_product_attention(
        q, k, v, mask, dropout, is_causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out, None


def maskless(layout: Layout) -> tuple[int, int, bool] | None:
    """Return (start, stop, is_causal) if no mask is needed over the keys start … stop - 1; None if one is.

    Either every query of every head reads all of these keys, or query i reads them up to the i-th.
    """
    if not torch.compiler.is_compiling():
        return _of_spans(layout)
    # a compiler cannot trace the spans of patterns
    if layout.pattern.kind == "full":
        return 0, layout.num_keys, False
    is_causal = layout.pattern.kind == "causal" and layout.query_offset == 0
    return (0, layout.num_queries, True) if is_causal else None


@cached()
def _of_spans(layout: Layout) -> tuple[int, int, bool] | None:
    groups = layout.head_groups()
    if len(groups) > 1:
        return None
    pattern, num_keys = groups[0][2], layout.num_keys
    first, last = layout.query_offset, layout.query_offset + layout.num_queries - 1
    read_by_any = pattern.key_spans(first, last, num_keys)
    if len(read_by_any) == 1 and read_by_any == pattern.full_key_spans(first, last, num_keys):
        return *read_by_any[0], False
    if first == 0 and all(pattern.key_spans(row, row, num_keys) == ((0, row + 1),) for row in range(last + 1)):
        return 0, layout.num_queries, True
    return None
