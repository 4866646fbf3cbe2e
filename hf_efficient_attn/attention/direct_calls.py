"""Calls that are one call of torch's SDPA, and what is passed to it: found once, for the next calls alike.

A kernel of a few hundred tokens leaves nothing of the host's work in its caches, so that the same lines of Python take
ten times as long beside it as alone: what short calls cost is how much is looked up for them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_efficient_attn.backends.dense_kernel import fused
from hf_efficient_attn.backends.sdpa import computed_dtype, has_no_kernel
from hf_efficient_attn.layout.call import AttentionCall
from hf_efficient_attn.layout.dense.additive import additive_mask
from hf_efficient_attn.layout.dense.maskless import maskless
from hf_efficient_attn.layout.dense.single_query import row_of
from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.layout.token_mask import NO_MASK
from hf_efficient_attn.patterns.checks import MAX_INTEGER

# longer calls are not worth keeping a mask for, beside the cache of masks
MAX_MASK_BYTES = 2**21


@dataclass(frozen=True, eq=False)
class DirectCall:
    """What is passed to torch's SDPA for several queries, once q, k and v are checked.

    Attributes:
        first, stop: the keys that are read; stop is None where these are all.
        mask: added to the scores, [1, heads or 1, queries, keys].
    """

    first: int
    stop: int | None
    mask: Tensor | None
    is_causal: bool
    scale: float

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the output [B, H, Nq, Dv]."""
        if self.stop is not None:
            k, v = k[:, :, self.first : self.stop], v[:, :, self.first : self.stop]
        return fused(q, k, v, self.mask, self.is_causal, self.scale, 0.0, need_lse=False)[0]


@dataclass(frozen=True, eq=False)
class DirectStep:
    """What is passed to torch's SDPA for a step of decoding, whose only query is the last of any number of tokens.

    Attributes:
        layout: of such a step, of some length.
        left: how many tokens before the query are read, each `step` before the next, if that is all that its pattern
            says; None: it is asked.
    """

    layout: Layout
    left: int | None
    step: int
    scale: float

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
        """Return the output [B, H, 1, Dv]; None: keys apart from each other are read, or others by other heads."""
        stop = k.shape[2]
        if self.left is None:
            intervals = row_of(self.layout.at_step(stop)).common
            if len(intervals) != 1:
                return None
            read = slice(*intervals[0])
        else:
            num_before = min(self.left, stop - 1) // self.step
            read = slice(stop - 1 - num_before * self.step, stop, self.step)
        return fused(q, k[:, :, read], v[:, :, read], None, False, self.scale, 0.0, need_lse=False)[0]


def _is_direct(call: AttentionCall) -> bool:
    """Return whether the backend "sdpa" computes a call by no more than torch's SDPA, but for a mask."""
    is_plain = call.tokens.is_empty and not call.terms and call.sinks is None and call.chosen is None
    is_plain = is_plain and not call.lse_needs_grad and not has_no_kernel(call)
    return is_plain and call.softcap is None and computed_dtype(call) == call.inputs.dtype


def direct_step(call: AttentionCall) -> DirectStep | None:
    """Return what a step of decoding passes to torch by the backend "sdpa"; None: it takes more."""
    if not _is_direct(call):
        return None
    left, right, step = call.layout.pattern.spaced_limits or (-1, -1, 1)
    if left == -1 or right == -1:
        return DirectStep(call.layout, None, 1, call.scale)
    # without a limit, as many as there are in no text
    return DirectStep(call.layout, MAX_INTEGER if left is None else left, step, call.scale)


def direct_call(call: AttentionCall, device: torch.device) -> DirectCall | None:
    """Return what a call of several queries passes to torch by the backend "sdpa"; None: it takes more."""
    layout, inputs = call.layout, call.inputs
    if not _is_direct(call):
        return None
    unmasked = maskless(layout)
    if unmasked is not None:
        first, stop, is_causal = unmasked
        # as in `sdpa.attend`: kernels mask before they scale
        is_read = not is_causal or call.scale > 0.0
        last = stop if stop - first < layout.num_keys else None
        return DirectCall(first, last, None, is_causal, call.scale) if is_read else None
    # some kernels are slow where heads share keys and there is a mask; elsewhere rows without keys are found too late
    is_long = layout.num_queries * layout.num_keys * inputs.dtype.itemsize > MAX_MASK_BYTES
    if layout.num_heads != inputs.num_key_heads or is_long or inputs.device != "cpu":
        return None
    mask, keyless = additive_mask(layout, NO_MASK, inputs.batch_size, device, inputs.dtype)
    is_short = mask is not None and mask.nbytes <= MAX_MASK_BYTES
    return DirectCall(0, None, mask, False, call.scale) if is_short and keyless is None else None
