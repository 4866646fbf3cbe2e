"""The log-sum-exp of the scores of every query, for kernels that do not return it."""

from contextlib import nullcontext
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from hf_efficient_attn.layout.call import AttentionCall
from hf_efficient_attn.layout.dense.pairs import uncached_pairs
from hf_efficient_attn.layout.dense.read_pairs import read_pairs
from hf_efficient_attn.layout.sinks import cap
from hf_efficient_attn.layout.terms import Term

CHUNK_QUERIES = 256


def row_lse(q: Tensor, k: Tensor, call: AttentionCall) -> Tensor:
    """Return the log-sum-exp of each query's scores without sinks, [batch, heads, queries]; -inf without keys.

    It takes memory for CHUNK_QUERIES queries at a time; with a gradient, for all. Without keys the gradient is 0.
    """
    with nullcontext() if call.differentiates_lse else torch.no_grad():
        return _row_lse(q, k, call)


def _row_lse(q: Tensor, k: Tensor, call: AttentionCall) -> Tensor:
    layout, tokens = call.layout, call.tokens
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1).to(lse_dtype(q))
    chunks = []
    # which keys are chosen is found for all queries at once, and a program for every length has no loop over them
    is_whole = call.chosen is not None or not isinstance(layout.num_queries, int)
    for start in (0,) if is_whole else range(0, layout.num_queries, CHUNK_QUERIES):
        count = layout.num_queries if is_whole else min(CHUNK_QUERIES, layout.num_queries - start)
        part = replace(layout, num_queries=count, query_offset=layout.query_offset + start)
        scores = cap(q[:, :, start : start + count].to(k.dtype) @ k.transpose(-1, -2) * call.scale, call.softcap)
        allowed = uncached_pairs(part, tokens, q.shape[0], q.device)
        terms = [_rows(term, start, count) for term in call.terms]
        num_key_heads = call.inputs.num_key_heads
        pairs, added = read_pairs(allowed, terms, call.chosen, part, tokens, num_key_heads, k.dtype, q.device)
        scores = scores if added is None else scores + added
        chunks.append(torch.logsumexp(scores.masked_fill(~cast(Tensor, pairs), -torch.inf), -1))
    return torch.cat(chunks, -1)


def _rows(term: Term, start: int, count: int) -> Term:
    return term if term.values.shape[2] == 1 else replace(term, values=term.values[:, :, start : start + count])


def lse_dtype(q: Tensor) -> torch.dtype:
    """Return the dtype in which scores are summed: float64 for float64 inputs, otherwise float32."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32
