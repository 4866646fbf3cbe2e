"""Calls that are one call of torch's SDPA, and what is passed to it: found once, for the next calls alike.

A kernel of a few hundred tokens leaves nothing of the host's work in its caches, so that the same lines of Python take
ten times as long beside it as alone: what short calls cost is how much is looked up for them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hf_efficient_attn.backends.alignment import aligned
from hf_efficient_attn.backends.fused_cpu import plain_rows
from hf_efficient_attn.backends.sdpa import computed_dtype, has_no_kernel
from hf_efficient_attn.layout.call import AttentionCall
from hf_efficient_attn.layout.dense.additive import additive_mask
from hf_efficient_attn.layout.dense.maskless import maskless
from hf_efficient_attn.layout.token_mask import NO_MASK

# longer calls are not worth keeping a mask for, beside the cache of masks
MAX_MASK_BYTES = 2**21


@dataclass(frozen=True, eq=False)
class DirectCall:
    """What is passed to torch's SDPA, once q, k and v are checked.

    Attributes:
        first, stop: the keys that are read; stop is None where these are all.
        mask: added to the scores, [1, heads or 1, queries, keys].
        shares_keys: whether several heads read one key head.
    """

    first: int
    stop: int | None
    mask: Tensor | None
    is_causal: bool
    scale: float
    shares_keys: bool
    is_on_cpu: bool

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the output [B, H, Nq, Dv]."""
        if self.stop is not None:
            k, v = k[:, :, self.first : self.stop], v[:, :, self.first : self.stop]
        q, k, v = plain_rows(q, k, v) if self.is_on_cpu else aligned(q, k, v)
        return scaled_dot_product_attention(
            q, k, v, self.mask, 0.0, self.is_causal, scale=self.scale, enable_gqa=self.shares_keys
        )


def direct_call(call: AttentionCall, device: torch.device) -> DirectCall | None:
    """Return what a call of the backend "sdpa" without tensors of its own passes to torch; None: it takes more."""
    layout, inputs = call.layout, call.inputs
    is_plain = layout.num_queries > 1 and call.tokens.is_empty and not call.terms and call.sinks is None
    is_plain = is_plain and call.chosen is None and not call.lse_needs_grad and not has_no_kernel(call)
    if not is_plain or computed_dtype(call) != inputs.dtype:
        return None
    shares_keys, is_on_cpu = layout.num_heads != inputs.num_key_heads, inputs.device == "cpu"
    unmasked = maskless(layout)
    if unmasked is not None:
        first, stop, is_causal = unmasked
        # as in `sdpa.attend`: kernels mask before they scale
        is_read = not is_causal or call.scale > 0.0
        last = stop if stop - first < layout.num_keys else None
        return DirectCall(first, last, None, is_causal, call.scale, shares_keys, is_on_cpu) if is_read else None
    # with a mask, some kernels are slow where heads share keys
    if shares_keys or layout.num_pairs * inputs.dtype.itemsize > MAX_MASK_BYTES * layout.num_heads:
        return None
    mask, keyless = additive_mask(layout, NO_MASK, inputs.batch_size, device, inputs.dtype)
    is_short = mask is not None and mask.nbytes <= MAX_MASK_BYTES
    return DirectCall(0, None, mask, False, call.scale, False, is_on_cpu) if is_short and keyless is None else None
