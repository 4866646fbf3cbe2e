"""Forward and backward of a whole call: a kernel computes each run of each slice, log-sum-exp joins the results."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from hf_efficient_attn.backends.blocked.call_slices import (
    CallSlice,
    Scratch,
    add_key_blocks,
    blank_rows,
    call_slices,
    in_order,
    key_blocks,
    query_blocks,
    shares_queries,
)
from hf_efficient_attn.backends.blocked.terms import TermLookups
from hf_efficient_attn.backends.blocked.threads import over_heads
from hf_efficient_attn.backends.kernels import (
    Explicit,
    FusedCPU,
    dropper,
    empty_output,
    is_fused,
    lse_of_weights,
    plain_rows,
    sink_gradient,
    wide_dtype,
)
from hf_efficient_attn.backends.machine_costs import costs_of
from hf_efficient_attn.layout.block_layout import Run
from hf_efficient_attn.layout.call import AttentionCall, join_sinks

# Examples that are alike are folded into the heads: one slice is computed instead of one per example.


def fold_batch(call: AttentionCall, tensors: tuple[Tensor, ...]) -> tuple[AttentionCall, tuple[Tensor, ...]]:
    """Return the tensors with the examples folded into the heads, if all are alike and views suffice.

    Each slice costs a fixed time, and folding leaves one slice instead of one per example. The layout stays that of
    one example, for which it is compiled.
    """
    batch_size, num_heads = tensors[0].shape[:2]
    if batch_size == 1 or not call.tokens.is_empty or len(call.layout.head_groups()) > 1:
        return call, tensors
    if not all(is_foldable(tensor, num_heads) for tensor in tensors):
        return call, tensors
    terms = tuple(replace(term, values=fold_values(term.values, batch_size, num_heads)) for term in call.terms)
    return replace(call, terms=terms), tuple(tensor.flatten(0, 1)[None] for tensor in tensors)


def fold_values(values: Tensor, batch_size: int, num_heads: int) -> Tensor:
    """Return the values of a term with the examples folded into the heads; [1, 1, ...] if all are alike."""
    if values.shape[:2] == (1, 1):
        return values
    return values.expand(batch_size, num_heads, -1, -1).flatten(0, 1)[None]


def unfold_gradient(gradient: Tensor, batch_size: int, values: Tensor) -> Tensor:
    """Return the gradient of folded values in the shape of the values."""
    if gradient.shape == values.shape:
        return gradient
    return gradient.unflatten(1, (batch_size, -1))[0].sum_to_size(values.shape)


def is_foldable(tensor: Tensor, num_heads: int) -> bool:
    """Return whether batch and heads of a tensor can become one dimension without a copy."""
    return tensor.shape[1] == num_heads and (num_heads == 1 or tensor.stride(0) == num_heads * tensor.stride(1))


# elements of the largest buffer of one kernel call: on CPUs small enough for the allocator to reuse it; on GPUs
# larger, because a launch costs more than memory that the allocator keeps anyway
MAX_BUFFER = 1 << 21
MAX_BUFFER_OFF_CPU = 1 << 25
# elements of the scores of `Explicit` on CPUs: many operations read them, so they must fit in a core's cache
MAX_SCORES = 1 << 19
# elements per thread in one call of the fused operator: its output, or gathered keys, fit in a core's cache; in a
# backward pass together with their gradients
MAX_PER_THREAD = 1 << 19


def parts_of(call: AttentionCall) -> tuple[AttentionCall, ...]:
    """Return disjoint calls that together are this one; the first has the pairs whose only term is known to be 0."""
    idle = call.terms[0].label.idle if len(call.terms) == 1 else None
    if idle is None or call.dropout > 0.0:
        return (call,)
    pattern = call.layout.pattern
    return (
        replace(call, layout=replace(call.layout, pattern=pattern & idle), terms=()),
        replace(call, layout=replace(call.layout, pattern=pattern & ~idle)),
    )


def forward(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return out [B, H, Nq, Dv] in q's dtype, and lse [B, H, Nq] in float32 or float64; `seed` is that of dropout."""
    dtype, (q, k, v) = q.dtype, costs_of(call).forward.in_fast_dtype(q, k, v)
    total = empty_output(q, v, wide_dtype(q.dtype))
    lse = total.new_empty(q.shape[:3])
    for number, part in enumerate(parts_of(call)):
        fused = is_fused(part)
        states = plain_rows(q, k, v) if fused else (q, k, v)
        own, (queries, keys, values, *results) = fold_batch(part, (*states, total, lse))
        compute = partial(forward_part, seed=seed, fused=fused, writes=number == 0)
        # dropout, which is never fused, is drawn for all heads at once
        over_heads(compute, own, (queries, *results), (keys, values), may_divide=fused)
    if call.sinks is not None:
        total, lse = join_sinks(total, lse, call.sinks)
    masked = call.masked_queries
    if masked is not None:
        total.masked_fill_(masked, 0.0)
        lse.masked_fill_(masked[..., 0], float("-inf"))
    return total.to(dtype), lse


def forward_part(
    call: AttentionCall,
    of_queries: Sequence[Tensor],
    of_keys: Sequence[Tensor],
    seed: int,
    fused: bool,
    writes: bool,
) -> None:
    """Write the attention of some heads to the output and the log-sum-exp, or join it to what these hold so far.

    Args:
        of_queries: q, output, log-sum-exp; examples may be folded into their heads.
        of_keys: k, v.
        seed: seed of dropout.
        writes: whether output and log-sum-exp hold nothing so far.
    """
    (q, out_rows, lse_rows), (k, v) = of_queries, of_keys
    kernels = Kernels(call, seed, fused, q.device)
    costs = costs_of(call).forward.of_kernel(fused)
    for heads, rows in blank_rows(call, costs, q.device) if writes else ():
        out_rows[:, heads, rows], lse_rows[:, heads, rows] = 0.0, float("-inf")
    writes = writes and not shares_queries(call)
    sizes = (fused, q.shape[-1], q.device, torch.get_num_threads())
    for call_slice in call_slices(call, q, k, costs):
        queries, keys = call_slice.take((q, out_rows, lse_rows), (k, v))
        most = partial(forward_queries, len(queries[0]), *sizes)
        for run, chunk in call_slice.partition.chunks((forward_queries, len(queries[0]), sizes), most):
            bias = chunk.bias if call_slice.masked_key_bias is None else bias_of(call_slice, chunk)
            kernel = kernels.next(call_slice, run, chunk)
            forward_run(kernel, queries, key_blocks(keys, chunk, kernels.scratch), chunk, bias, writes)
        call_slice.put_back((out_rows, lse_rows), queries[1:], (), ())


def forward_run(
    kernel: FusedCPU | Explicit,
    queries: list[Tensor],
    keys: list[Tensor],
    run: Run,
    bias: Tensor | None,
    writes: bool,
) -> None:
    """Compute a run; write it to output and lse if it is the first run of its queries, otherwise join it to them."""
    q, total, lse = query_blocks(queries, run)
    k, v = keys
    out, run_lse = kernel.forward(q, k, v, bias)
    if bias is not None:
        empty_rows = run.empty_rows if bias is run.bias else (bias == float("-inf")).all(-1)
        if empty_rows is not None:
            run_lse = run_lse.masked_fill(empty_rows, float("-inf"))
    if writes and run.is_first:
        total.copy_(out)
        lse.copy_(run_lse)
        return
    # the share of the run in the softmax; 0 if neither side has a key
    share = torch.sigmoid(run_lse - lse).nan_to_num_(0.0)
    total.lerp_(out.to(total.dtype), share[..., None])
    lse.copy_(torch.logaddexp(lse, run_lse))


def backward(
    grad: Tensor,
    d_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    call: AttentionCall,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Return the gradients of q, k, v, and of the values of each term and the sinks."""
    dtype, (grad, q, k, v, out) = q.dtype, costs_of(call).backward.in_fast_dtype(grad, q, k, v, out)
    wide = wide_dtype(q.dtype)
    grads = [torch.empty_like(q, dtype=wide), *(torch.zeros_like(tensor, dtype=wide) for tensor in (k, v))]
    d_terms = [torch.zeros_like(term.values, dtype=wide) for term in call.terms]
    masked = call.masked_queries
    grad = grad if masked is None else grad.masked_fill(masked, 0.0)
    lse = lse_of_weights(lse)
    # what is subtracted from the gradient of every weight of a row
    delta = None if d_lse is None else ((grad.to(wide) * out).sum(-1) - d_lse.to(wide)).where(lse < torch.inf, 0.0)
    for number, part in enumerate(parts_of(call)):
        # the fused operator computes delta itself
        fused = is_fused(part) and delta is None
        read = plain_rows(q, k, v, grad, out) if fused else (q, k, v, grad, out)
        rows = (lse, grads[0]) if delta is None else (lse, delta, grads[0])
        own, (queries, keys, values, *others, dk, dv) = fold_batch(part, (*read, *rows, *grads[1:]))
        compute = partial(backward_part, seed=seed, fused=fused, writes=number == 0)
        for gradients in over_heads(compute, own, (queries, *others), (keys, values, dk, dv), may_divide=fused):
            for total, gradient, term in zip(d_terms, gradients, part.terms, strict=False):
                total.add_(unfold_gradient(gradient, len(q), term.values))
    dq, dk, dv = (total.to(dtype) for total in grads)
    learned = [total.to(term.values.dtype) for total, term in zip(d_terms, call.terms, strict=True)]
    if call.sinks is not None:
        learned.append(sink_gradient(call.sinks, grad, out, lse, delta))
    return dq, dk, dv, learned


def backward_part(
    call: AttentionCall,
    of_queries: Sequence[Tensor],
    of_keys: Sequence[Tensor],
    seed: int,
    fused: bool,
    writes: bool,
) -> list[Tensor]:
    """Add the gradients of some heads to dq, dk and dv; return those of the values of terms.

    Args:
        of_queries: q, grad, out, lse, delta if it is not None, dq; examples may be folded into their heads.
        of_keys: k, v, dk, dv.
        seed: seed of dropout.
        writes: whether dq holds nothing so far.
    """
    (q, *rows), (k, v, dk, dv) = of_queries, of_keys
    kernels = Kernels(call, seed, fused, q.device)
    costs = costs_of(call).backward.of_kernel(fused)
    for heads, places in blank_rows(call, costs, q.device) if writes else ():
        rows[-1][:, heads, places] = 0.0
    writes = writes and not shares_queries(call)
    sizes = (fused, q.shape[-1], q.device, torch.get_num_threads())
    for call_slice in call_slices(call, q, k, costs):
        queries, keys = call_slice.take((q, *rows), (k, v, dk, dv))
        most = partial(backward_queries, len(queries[0]), *sizes)
        for run, chunk in call_slice.partition.chunks((backward_queries, len(queries[0]), sizes), most):
            bias = chunk.bias if call_slice.masked_key_bias is None else bias_of(call_slice, chunk)
            kernel, blocks = kernels.next(call_slice, run, chunk), key_blocks(keys[:2], chunk, kernels.scratch)
            d_scores = backward_run(kernel, queries, blocks, keys[2:], chunk, bias, writes)
            if d_scores is not None:
                kernels.lookups.add_gradients(d_scores, call_slice, run, chunk)
        call_slice.put_back(rows[-1:], queries[-1:], (dk, dv), keys[2:])
    return kernels.lookups.finish()


def backward_run(
    kernel: FusedCPU | Explicit,
    queries: list[Tensor],
    keys: list[Tensor],
    d_keys: list[Tensor],
    run: Run,
    bias: Tensor | None,
    writes: bool,
) -> Tensor | None:
    """Add the gradients of a run to dq, dk and dv; return that of its scores if the kernel computes it.

    If `writes`, the first run of its queries overwrites dq instead.
    """
    q, grad, out, lse, *delta, dq = query_blocks(queries, run)
    k, v = keys
    run_dq, run_dk, run_dv, *d_scores = kernel.backward(grad, q, k, v, out, lse, bias, *delta)
    if writes and run.is_first:
        dq.copy_(run_dq)
    else:
        dq.add_(run_dq)
    add_key_blocks(d_keys[0], run_dk, run)
    add_key_blocks(d_keys[1], run_dv, run)
    return d_scores[0] if d_scores else None


class Kernels:
    """Makes the kernels of runs one by one; the backward pass makes the same ones in the same order."""

    def __init__(self, call: AttentionCall, seed: int, is_fused: bool, device: torch.device) -> None:
        self.call = call
        self.seed = seed
        self.is_fused = is_fused
        self.device = device
        self.count = 0
        # one for keys, one for values
        self.scratch = (Scratch(), Scratch())
        self.lookups = TermLookups(call.terms)

    def next(self, call_slice: CallSlice, run: Run, chunk: Run) -> FusedCPU | Explicit:
        """Return the kernel of the next chunk of a run."""
        if self.is_fused:
            return FusedCPU(self.call.scale)
        self.count += 1
        terms, call = self.lookups.scores(call_slice, run, chunk), self.call
        return Explicit(call.scale, terms, self.drop(), call.dropout, call.softcap, call.sinks is not None)

    def drop(self) -> Callable[[tuple[int, ...]], Tensor] | None:
        """Return a function that draws which weights are dropped, the same ones for the same seed and count."""
        return dropper(self.call.dropout, self.seed + self.count, self.device)


def forward_queries(num_heads: int, fused: bool, head_dim: int, device: torch.device, threads: int, run: Run) -> int:
    """Return how many queries of a run are computed together in a forward pass."""
    return max_buffer(run, fused, device, threads) // (num_heads * buffer_width(run, head_dim, fused))


def backward_queries(num_heads: int, fused: bool, head_dim: int, device: torch.device, threads: int, run: Run) -> int:
    """Return how many queries of a run are computed together in a backward pass."""
    copies = max(1.0, run.key_tokens / run.block_tokens) if run.num_blocks > 1 else 1.0
    copies *= 1 if run.gathered is None else 2
    # dropout is drawn per chunk, so chunks that are not fused must be those of the forward pass
    width = head_dim * copies if fused else buffer_width(run, head_dim, fused)
    return int(max_buffer(run, fused, device, threads) / (num_heads * width))


def buffer_width(run: Run, head_dim: int, is_fused: bool) -> int:
    """Return how many elements the largest buffer of a forward pass has for each query: scores, or copies of keys."""
    width = head_dim if is_fused else run.key_tokens
    return width if run.gathered is None else max(width, head_dim * run.key_tokens // run.block_tokens)


def max_buffer(run: Run, is_fused: bool, device: torch.device, threads: int) -> int:
    """Return how many elements the largest buffer of one kernel call may have."""
    if device.type != "cpu":
        return MAX_BUFFER_OFF_CPU
    if not is_fused:
        return MAX_SCORES
    return min(MAX_BUFFER, MAX_PER_THREAD * threads)


def bias_of(call_slice: CallSlice, run: Run) -> Tensor | None:
    """Return the bias of a run, with -inf for the masked keys of its slice: [blocks or 1, queries or 1, keys]."""
    assert call_slice.masked_key_bias is not None
    holes = in_order(call_slice.masked_key_bias[None], call_slice.partition.keys)[..., None]
    holes = key_blocks([holes], run, [Scratch()])[0][0, :, None, :, 0]
    return holes.expand(-1, run.block_tokens, -1) if run.bias is None else run.bias + holes
