"""Forward and backward of a whole call: every run of every problem through a kernel, results joined by log-sum-exp."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_efficient_attn.backends.blocked.kernels import FUSED_DTYPES, Explicit, FusedCPU, finite, wide_dtype
from hf_efficient_attn.backends.blocked.problems import Problem, problems
from hf_efficient_attn.backends.blocked.term_lookup import TermLookup
from hf_efficient_attn.backends.blocked.views import (
    add_key_blocks,
    in_order,
    key_blocks,
    put_back,
    query_blocks,
)
from hf_efficient_attn.layout.block_layout import Part, Run
from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.layout.terms import Term
from hf_efficient_attn.layout.token_mask import TokenMask

# queries per block: the fused operator is fastest on short blocks forward, on longer ones backward
FORWARD_BLOCK_TOKENS = 32
BACKWARD_BLOCK_TOKENS = 96
EXPLICIT_BLOCK_TOKENS = 64
# elements of the largest buffer of one kernel call: small enough for the allocator to use it again
MAX_BUFFER = 1 << 21


@dataclass(frozen=True)
class Call:
    """Everything about a call but q, k and v. `seed` is that of the dropout."""

    layout: Layout
    tokens: TokenMask
    terms: tuple[Term, ...]
    scale: float
    dropout: float = 0.0
    seed: int = 0

    def is_fused(self, q: Tensor, v: Tensor) -> bool:
        """Return whether the fused operator can do it."""
        is_plain = not self.terms and self.dropout == 0.0 and q.shape[-1] == v.shape[-1]
        return is_plain and q.device.type == "cpu" and q.dtype in FUSED_DTYPES


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Return out [B, H, Nq, Dv] in q's dtype, and lse [B, H, Nq] in float32 or float64."""
    total = empty_output(q, v, wide_dtype(q.dtype)).zero_()
    lse = total.new_full(q.shape[:3], float("-inf"))
    is_fused = call.is_fused(q, v)
    kernels = Kernels(call)
    for problem in problems(
        call.layout,
        call.tokens,
        q.shape[0],
        k.shape[1],
        FORWARD_BLOCK_TOKENS if is_fused else EXPLICIT_BLOCK_TOKENS,
        q.device,
    ):
        for part in problem.blocks.parts:
            queries = [in_order(problem.of_queries(tensor), part.queries) for tensor in (q, total, lse)]
            keys = [in_order(problem.of_keys(tensor), part.keys) for tensor in (k, v)]
            for run in part.runs:
                width = q.shape[-1] if is_fused else run.key_tokens
                for piece in run.cut(max(1, MAX_BUFFER // (queries[0].shape[0] * width))):
                    kernel = FusedCPU(call.scale) if is_fused else kernels.next(problem, part, piece)
                    forward_run(kernel, queries, keys, piece, bias_of(problem, part, piece))
            for tensor, rows in zip((total, lse), queries[1:], strict=True):
                put_back(problem.of_queries(tensor), part.queries, rows)
        if problem.hole_rows is not None:
            problem.of_queries(total).masked_fill_(problem.hole_rows[:, None], 0.0)
            problem.of_queries(lse).masked_fill_(problem.hole_rows, float("-inf"))
    return total.to(q.dtype), lse


def forward_run(
    kernel: FusedCPU | Explicit, queries: list[Tensor], keys: list[Tensor], run: Run, bias: Tensor | None
) -> None:
    """Compute a run and join it to the output and the log-sum-exp so far."""
    q, total, lse = (query_blocks(tensor, run) for tensor in queries)
    k, v = (key_blocks(tensor, run) for tensor in keys)
    out, run_lse = kernel.forward(q, k, v, bias)
    if bias is not None:
        empty_rows = run.empty_rows if bias is run.bias else (bias == float("-inf")).all(-1)
        if empty_rows is not None:
            run_lse = run_lse.masked_fill(empty_rows, float("-inf"))
    # the share of the run in the softmax; neither has a key: 0
    share = torch.sigmoid(run_lse - lse).nan_to_num_(0.0)
    total.lerp_(out.to(total.dtype), share[..., None])
    lse.copy_(torch.logaddexp(lse, run_lse))


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Return the gradients of q, k, v and of the values of each term."""
    wide = wide_dtype(q.dtype)
    dq, dk, dv = (torch.zeros_like(tensor, dtype=wide) for tensor in (q, k, v))
    d_terms = [torch.zeros_like(term.values, dtype=wide) for term in call.terms]
    is_fused = call.is_fused(q, v)
    kernels = Kernels(call)
    lse = finite(lse)
    for problem in problems(
        call.layout,
        call.tokens,
        q.shape[0],
        k.shape[1],
        BACKWARD_BLOCK_TOKENS if is_fused else EXPLICIT_BLOCK_TOKENS,
        q.device,
    ):
        own_grad = problem.of_queries(grad)
        if problem.hole_rows is not None:
            own_grad = own_grad.masked_fill(problem.hole_rows[:, None], 0.0)
        rows = [own_grad, *(problem.of_queries(tensor) for tensor in (q, out, lse, dq))]
        for part in problem.blocks.parts:
            queries = [in_order(tensor, part.queries) for tensor in rows]
            keys = [in_order(problem.of_keys(tensor), part.keys) for tensor in (k, v, dk, dv)]
            for run in part.runs:
                rows_per_block = run.key_tokens / run.block_tokens if run.num_blocks > 1 else 1.0
                width = q.shape[-1] * rows_per_block if is_fused else run.key_tokens
                for piece in run.cut(max(1, int(MAX_BUFFER / (rows[0].shape[0] * width)))):
                    kernel = FusedCPU(call.scale) if is_fused else kernels.next(problem, part, piece)
                    d_scores = backward_run(kernel, queries, keys, piece, bias_of(problem, part, piece))
                    for term, gradient in zip(call.terms, d_terms, strict=True):
                        TermLookup(term, problem, part, piece).add_gradient(gradient, d_scores)
            put_back(problem.of_queries(dq), part.queries, queries[-1])
            for tensor, part_keys in zip((dk, dv), keys[2:], strict=True):
                put_back(problem.of_keys(tensor), part.keys, part_keys)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), d_terms


def backward_run(
    kernel: FusedCPU | Explicit, queries: list[Tensor], keys: list[Tensor], run: Run, bias: Tensor | None
) -> Tensor | None:
    """Add the gradients of a run to dq, dk and dv; return that of its scores from the kernel that has it."""
    grad, q, out, lse, dq = (query_blocks(tensor, run) for tensor in queries)
    k, v = (key_blocks(tensor, run) for tensor in keys[:2])
    run_dq, run_dk, run_dv, *d_scores = kernel.backward(grad, q, k, v, out, lse, bias)
    dq.add_(run_dq)
    add_key_blocks(keys[2], run_dk, run)
    add_key_blocks(keys[3], run_dv, run)
    return d_scores[0] if d_scores else None


class Kernels:
    """Makes the explicit kernel of one run after the other; the same ones again for the backward pass."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.count = 0

    def next(self, problem: Problem, part: Part, run: Run) -> Explicit:
        """Return the kernel of the next run."""
        self.count += 1
        terms = [TermLookup(term, problem, part, run).scores() for term in self.call.terms]
        return Explicit(self.call.scale, sum(terms) if terms else None, self.keep(), self.call.dropout)

    def keep(self) -> Callable[[Tensor], Tensor] | None:
        """Return a function that draws which weights are kept; it draws the same ones for the same count."""
        dropout, seed = self.call.dropout, self.call.seed + self.count
        if dropout == 0.0:
            return None

        def draw(weights: Tensor) -> Tensor:
            generator = torch.Generator(weights.device).manual_seed(seed)
            return torch.rand(weights.shape, generator=generator, device=weights.device) >= dropout

        return draw


def bias_of(problem: Problem, part: Part, run: Run) -> Tensor | None:
    """Return the bias of a run with that of masked keys, [blocks or 1, queries or 1, keys]."""
    if problem.hole_bias is None:
        return run.bias
    holes = key_blocks(in_order(problem.hole_bias[None], part.keys)[..., None], run)[0, :, None, :, 0]
    return holes.expand(-1, run.block_tokens, -1) if run.bias is None else run.bias + holes


def empty_output(q: Tensor, v: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an uninitialised output, in the memory order of q where the widths agree."""
    if q.shape[-1] == v.shape[-1]:
        return torch.empty_like(q, dtype=dtype)
    return q.new_empty(*q.shape[:-1], v.shape[-1], dtype=dtype)
