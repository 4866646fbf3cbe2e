"""Attention by torch's scaled_dot_product_attention over all pairs.

This is the fastest backend for full and causal patterns, and for short inputs.
"""

from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hf_efficient_attn.backends.kernels import aligned, fused_attention, plain_rows, repeated_row
from hf_efficient_attn.backends.machine_costs import costs_of
from hf_efficient_attn.layout.cache import MEBIBYTE
from hf_efficient_attn.layout.call import AttentionCall, join_sinks
from hf_efficient_attn.layout.decode_keys import ReadKeys, keys_of_query, maskless, read_keys
from hf_efficient_attn.layout.dense_mask import (
    additive,
    additive_mask,
    allowed_pairs,
    is_idle,
    num_counted,
    num_mask_bytes,
    read_pairs,
    row_lse,
    term_bias,
)
from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.layout.token_mask import NO_MASK
from hf_efficient_attn.patterns.bands import Causal, Full
from hf_efficient_attn.patterns.intervals import Intervals, size
from hf_efficient_attn.patterns.serialization import MAX_INTEGER

# torch's dense attention, over all keys or over several intervals that are joined as in one softmax.


def joined(
    q: Tensor, k: Tensor, v: Tensor, intervals: Intervals, mask: Tensor | None, scale: float, need_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Return output, and lse if needed, over several intervals of the keys, without copies and without gradients."""
    outs, lses, first = [], [], 0
    for start, stop in intervals:
        part = None if mask is None else mask[..., first : first + stop - start]
        first += stop - start
        out, part_lse = fused(q, k[:, :, start:stop], v[:, :, start:stop], part, False, scale, 0.0, need_lse=True)
        # the kernel for CPUs, the only device here, always returns lse, which is 0 for rows without keys
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
        # single queries of heads that share keys are computed as several queries of one head
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


NAME = "sdpa"
RANK_WITHOUT_MASK = 10
# time to make one entry of a mask; these times are in scores of dense attention without a mask
SCORES_PER_MASK_ENTRY = 50
# time of a score on CPUs with dropout, terms, or values of another width than keys: 3 to 4 with gradients, 5 to 9
# without
SCORES_PER_UNFUSED_SCORE = 4.0
# time and bytes per pair if keys are selected: making the mask first counts the pairs; the bytes are approximate
SCORES_PER_SELECTED_PAIR, BYTES_PER_SELECTED_PAIR = 10, 20
# kernels skip blocks of this many keys of a causal triangle (measured on a CPU: 1.00, 0.76, 0.64, 0.59 and 0.50 of the
# time of all pairs at 512, 1,024 ... 8,192 tokens); for other devices an estimate, not measured
TRIANGLE_BLOCK_TOKENS = 512
TRIANGLE_BLOCK_TOKENS_ELSEWHERE = 128
# memory per pair: bools while the mask is made, bytes of a term's label and score, numbers without a fused kernel
BOOLS_PER_MASKED_PAIR = 2
BYTES_PER_BIAS = 16
NUMBERS_PER_SCORE = 3
# up to this many scores per head, comparing backends on a CPU takes as long as computing the call
FEW_SCORES = 1 << 10
# if heads differ, a single query may attend to this many keys, of all heads, before backends are compared
MAX_KEY_READS = 1 << 17
# more intervals than this are copied into one tensor, not computed one by one
MAX_JOINED = 8
# up to this many elements are copied as well, which takes less time than another kernel call
MAX_COPIED = 1 << 17
# largest mask that a `DirectCall` keeps, in addition to the cache of masks
MAX_MASK_BYTES = 2**21


def why_not(call: AttentionCall) -> str | None:
    """Return one sentence on why this backend cannot compute a call; None: it can, given memory for all pairs."""
    if call.chosen is not None and call.chosen.needs_groups:
        return (
            "sdpa computes one softmax over all pairs of a query, not one per group (join, labels_count): use gathered."
        )
    if call.query_start is not None:
        return "sdpa cannot compile a query_offset that is a tensor: use blocked."
    if call.softcap is not None:
        return f"sdpa cannot cap scores (softcap is {call.softcap:g}): use blocked."
    if call.sinks is not None and call.dropout > 0:
        return f"sdpa returns no log-sum-exp, which sinks need, with dropout ({call.dropout}): use blocked."
    return None


def missing(call: AttentionCall) -> str | None:
    """Return None: nothing needs to be installed."""
    return None


def is_fastest(call: AttentionCall) -> bool:
    """Return whether no mask is needed, or only that of a single query, or the call is short."""
    layout = call.layout
    if call.inputs.device == "cpu" and layout.num_queries * layout.num_keys <= FEW_SCORES:
        return True
    if not is_single(call):
        return is_bare(call)
    return len(keys_of_query(layout.fitted).common) > 0 or computed_pairs(call) <= MAX_KEY_READS


def is_single(call: AttentionCall) -> bool:
    """Return whether the call has a single query and only the keys that it attends to are read."""
    # on other devices the host would have to wait for the masks
    is_here = call.inputs.device == "cpu" and not call.inputs.is_compiling
    return is_here and call.layout.num_queries == 1 and len(call.terms) == 0 and call.chosen is None


def cost(call: AttentionCall) -> float:
    """Return the estimated time of dense attention for one example, in scores without a mask."""
    layout, costs = call.layout, costs_of(call)
    per_masked = costs.masked(call.inputs.needs_grad)
    if is_single(call):
        per_score = SCORES_PER_UNFUSED_SCORE if has_no_kernel(call) else per_masked
        return computed_pairs(call) * (per_score + costs.key)
    plain = _unmasked(call)
    if plain is not None:
        start, stop, _ = plain
        return computed_pairs(call) + costs.key * layout.num_heads * (stop - start)
    is_unfused = call.inputs.device == "cpu" and (bool(call.terms) or has_no_kernel(call))
    is_unfused = is_unfused or call.differentiates_lse
    if maskless(layout.fitted) is not None and not is_unfused and call.chosen is None:
        per_key = layout.num_queries + costs.key
    else:
        # in cached decoding every step makes its own mask
        per_mask = SCORES_PER_MASK_ENTRY * layout.num_queries if layout.query_offset else 0
        per_score = SCORES_PER_UNFUSED_SCORE if is_unfused else per_masked
        per_key = per_score * layout.num_queries + costs.key + per_mask
    return layout.num_heads * layout.num_keys * per_key + SCORES_PER_SELECTED_PAIR * num_counted(call.chosen, layout)


def _unmasked(call: AttentionCall) -> tuple[int, int, bool] | None:
    """Return `maskless` of a call that a fused kernel computes without a mask; None for others."""
    is_unfused = (call.inputs.device == "cpu" and has_no_kernel(call)) or call.differentiates_lse
    has_mask = call.terms or not call.tokens.is_empty or call.chosen is not None
    return None if has_mask or is_unfused else maskless(call.layout)


def dense_cost(call: AttentionCall, is_causal: bool) -> float:
    """Return the estimated time of full or causal attention, without terms and sinks.

    The mask of a causal call after cached tokens is not counted, because transformers makes it once for all layers.
    """
    reads_triangle = is_causal and call.layout.query_offset == 0
    layout = replace(call.layout, pattern=Causal() if reads_triangle else Full())
    return cost(replace(call, layout=layout, terms=(), sinks=None, chosen=None))


def rank(call: AttentionCall) -> int | None:
    """Return the first rank for calls without a mask, which no backend computes faster; None for all others."""
    return RANK_WITHOUT_MASK if is_bare(call) else None


def remark(call: AttentionCall) -> str:
    """Return what it computes and how much memory it takes."""
    needed = f"{working_bytes(call) / MEBIBYTE:,.0f} MiB"
    return f"sdpa computes all pairs, and needs {needed} for their masks and scores."


def computed_pairs(call: AttentionCall) -> int:
    """Return the number of pairs, without keys and blocks of a triangle that are skipped if no mask is needed."""
    layout = call.layout
    if is_single(call):
        return layout.num_heads * keys_of_query(layout.fitted).num_computed
    plain = _unmasked(call)
    if plain is None:
        return layout.num_pairs
    start, stop, is_causal = plain
    pairs = layout.num_queries * (stop - start)
    if is_causal:
        block = TRIANGLE_BLOCK_TOKENS if call.inputs.device == "cpu" else TRIANGLE_BLOCK_TOKENS_ELSEWHERE
        pairs = min(pairs, layout.num_queries * (layout.num_queries + block) // 2)
    return layout.num_heads * pairs


def working_bytes(call: AttentionCall) -> int:
    """Return about how many bytes a call needs in addition to inputs and outputs.

    They hold the mask, the biases of terms, and all scores if torch has no fused kernel for the call. A call with a
    single query needs only copies of its keys and values.
    """
    layout, inputs = call.layout, call.inputs
    if is_single(call):
        # keys and values that are copied
        num_keys = inputs.batch_size * inputs.num_key_heads * keys_of_query(layout.fitted).num_computed
        return num_keys * (inputs.head_dim + inputs.value_dim) * inputs.dtype.itemsize
    has_mask = not call.tokens.is_empty or call.terms or maskless(layout.fitted) is None or call.chosen is not None
    num_examples = 1 if call.tokens.is_empty and call.chosen is None else inputs.batch_size
    num_mask_numbers = computed_dtype(call).itemsize + BOOLS_PER_MASKED_PAIR
    num_bytes = num_mask_bytes(layout, num_examples, num_mask_numbers) if has_mask else 0
    if call.terms:
        num_bytes += BYTES_PER_BIAS * num_examples * layout.num_pairs
    num_bytes += BYTES_PER_SELECTED_PAIR * num_examples * num_counted(call.chosen, layout)
    # torch's kernel for CPUs has no gradient of the mask
    is_unfused = inputs.device == "cpu" and (has_no_kernel(call) or (call.terms and inputs.needs_grad))
    if is_unfused or call.differentiates_lse:
        num_bytes += NUMBERS_PER_SCORE * max(4, inputs.dtype.itemsize) * inputs.batch_size * layout.num_pairs
    return num_bytes


def has_no_kernel(call: AttentionCall) -> bool:
    """Return whether torch's fused CPU kernel cannot compute a call, due to its dropout or the width of its values."""
    return call.dropout > 0.0 or call.inputs.head_dim != call.inputs.value_dim


def attend(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, need_lse: bool = True) -> tuple[Tensor, Tensor | None]:
    """Return output and lse; see `Backend`."""
    dtype, (q, k, v) = q.dtype, (each.to(computed_dtype(call)) for each in (q, k, v))
    read, is_causal = _read(q, k, call)
    mask, keyless = read.mask, read.keyless
    scaled, scale = q, call.scale
    if is_causal and scale <= 0.0:
        # kernels apply the causal mask (-inf) before they scale, and -inf times 0 or a negative number masks nothing
        scaled, scale = q * scale, 1.0
    need_lse = need_lse or call.sinks is not None
    # no kernel differentiates lse: to have its gradient, `row_lse` computes all scores again and keeps them
    is_kernels = need_lse and not call.differentiates_lse
    # the backward pass also computes the rows of masked tokens, whose values may be large enough to overflow
    scaled = scaled if keyless is None else scaled.masked_fill(keyless, 0)
    if len(read.intervals) > 1 and _is_joined(k, read.intervals, call):
        out, lse = joined(scaled, k, v, read.intervals, mask, scale, is_kernels)
    else:
        out, lse = fused(scaled, read.of(k), read.of(v), mask, is_causal, scale, call.dropout, is_kernels)
    if need_lse and lse is None:
        lse = row_lse(q, k, call)
    if keyless is not None:
        out = out.masked_fill(keyless, 0)
        lse = None if lse is None else lse.masked_fill(keyless[..., 0], -torch.inf)
    if lse is not None and call.sinks is not None:
        out, lse = join_sinks(out, lse, call.sinks)
        lse = lse if call.masked_queries is None else lse.masked_fill(call.masked_queries[..., 0], -torch.inf)
        lse = lse if call.lse_needs_grad else lse.detach()
    return out.to(dtype), lse


def computed_dtype(call: AttentionCall) -> torch.dtype:
    """Return the dtype in which a call is computed: the fastest one if gradients are needed, else that of the inputs.

    Without gradients little time would be saved. Compilers cannot trace the lookup of a machine's costs.
    """
    inputs = call.inputs
    is_cast = inputs.needs_grad and not torch.compiler.is_compiling()
    return costs_of(call).backward.fast_dtype(inputs.dtype, inputs.device) if is_cast else inputs.dtype


def _read(q: Tensor, k: Tensor, call: AttentionCall) -> tuple[ReadKeys, bool]:
    """Return the keys that queries attend to, and whether the call is causal without a mask."""
    layout, tokens, terms = call.layout, call.tokens, call.terms
    if is_single(call):
        return read_keys(layout, tokens, q.shape[0], q.dtype), False
    plain = None if terms or not is_idle(tokens) or call.chosen is not None else maskless(layout)
    if plain is not None:
        start, stop, is_causal = plain
        is_part = not torch.compiler.is_compiling() and stop - start < layout.num_keys
        return ReadKeys(((start, stop),) if is_part else ()), is_causal
    if call.chosen is not None:
        allowed = allowed_pairs(layout, tokens, q.shape[0], q.device)
        pairs, added = read_pairs(allowed, terms, call.chosen, layout, tokens, k.shape[1], q.dtype, q.device)
        mask, keyless = additive(cast(Tensor, pairs), q.dtype)
        return ReadKeys((), (cast(Tensor, mask) + cast(Tensor, added)).to(q.dtype), keyless), False
    mask, keyless = additive_mask(layout, tokens, q.shape[0], q.device, q.dtype)
    bias = term_bias(terms, layout, tokens, q.device)
    if bias is not None:
        mask = (bias if mask is None else bias + mask).to(q.dtype)
        # a term may leave a row without keys
        closed = (mask == -torch.inf).all(-1, keepdim=True)
        mask = mask.masked_fill(closed, 0.0)
        keyless = closed if keyless is None else closed | keyless
    return ReadKeys((), mask, keyless), False


def _is_joined(k: Tensor, intervals: Intervals, call: AttentionCall) -> bool:
    """Return whether the kernel is called for each interval of the keys, instead of once for a copy of them all."""
    num_copied = k.shape[0] * k.shape[1] * size(intervals) * k.shape[3]
    is_worth_it = num_copied > MAX_COPIED and len(intervals) <= MAX_JOINED
    return is_worth_it and not (call.inputs.needs_grad or has_no_kernel(call))


def is_bare(call: AttentionCall) -> bool:
    """Return whether torch's fused kernels compute a call without a mask, and so without memory beyond its tensors."""
    # `len`, since a compiler cannot evaluate a tuple of terms as a bool
    is_plain = call.tokens.is_empty and len(call.terms) == 0 and call.dropout == 0.0 and call.chosen is None
    is_plain = is_plain and call.inputs.head_dim == call.inputs.value_dim and not call.differentiates_lse
    return is_plain and maskless(call.layout) is not None


@dataclass(frozen=True, eq=False)
class DirectCall:
    """What a call of several queries passes to torch's SDPA, once q, k and v are checked.

    Attributes:
        first, stop: queries attend to the keys first … stop - 1; stop is None if these are all keys.
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
    """What a decoding step passes to torch's SDPA. Its only query is the last of any number of tokens.

    Attributes:
        layout: the layout of one step; `at_step` gives those of other lengths.
        left: how far the query attends back, to keys that are `step` tokens apart; None: the pattern has another form
            and is asked for the keys of each step.
    """

    layout: Layout
    left: int | None
    step: int
    scale: float

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
        """Return the output [B, H, 1, Dv]; None: the keys are not one interval, or not the same in all heads."""
        stop = k.shape[2]
        if self.left is None:
            intervals = keys_of_query(self.layout.at_step(stop)).common
            if len(intervals) != 1:
                return None
            read = slice(*intervals[0])
        else:
            num_before = min(self.left, stop - 1) // self.step
            read = slice(stop - 1 - num_before * self.step, stop, self.step)
        return fused(q, k[:, :, read], v[:, :, read], None, False, self.scale, 0.0, need_lse=False)[0]


def _is_direct(call: AttentionCall) -> bool:
    """Return whether the backend "sdpa" needs nothing but torch's SDPA, and perhaps a mask, to compute a call."""
    is_plain = call.tokens.is_empty and not call.terms and call.sinks is None and call.chosen is None
    is_plain = is_plain and not call.lse_needs_grad and not has_no_kernel(call)
    return is_plain and call.softcap is None and computed_dtype(call) == call.inputs.dtype


def direct_step(call: AttentionCall) -> DirectStep | None:
    """Return what the backend "sdpa" passes to torch in a decoding step; None: it has to compute more than that."""
    if not _is_direct(call):
        return None
    left, right, step = call.layout.pattern.spaced_limits or (-1, -1, 1)
    if left == -1 or right == -1:
        return DirectStep(call.layout, None, 1, call.scale)
    # no limit: more tokens than any input has
    return DirectStep(call.layout, MAX_INTEGER if left is None else left, step, call.scale)


def direct_call(call: AttentionCall, device: torch.device) -> DirectCall | None:
    """Return what the backend "sdpa" passes to torch for several queries; None: it has to compute more than that."""
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
    # some kernels are slow with a mask if heads share keys; other devices would have to wait to find rows without keys
    is_long = layout.num_queries * layout.num_keys * inputs.dtype.itemsize > MAX_MASK_BYTES
    if layout.num_heads != inputs.num_key_heads or is_long or inputs.device != "cpu":
        return None
    mask, keyless = additive_mask(layout, NO_MASK, inputs.batch_size, device, inputs.dtype)
    is_short = mask is not None and mask.nbytes <= MAX_MASK_BYTES
    return DirectCall(0, None, mask, False, call.scale) if is_short and keyless is None else None
