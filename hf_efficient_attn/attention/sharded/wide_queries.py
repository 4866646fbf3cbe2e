"""Wide queries, which attend to keys of all processes: each process attends to its own keys, and results are joined.

The queries and their outputs are sent, not the keys. Given the joined output and log-sum-exp, every process computes
its share of all gradients by itself.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed

from hf_efficient_attn.attention.sharded.collectives import exchanged, largest, route_of, summed
from hf_efficient_attn.attention.sharded.plan import cut_tokens
from hf_efficient_attn.attention.sharded.shards import (
    Bounds,
    Scores,
    ShardedCall,
    TokenSequence,
    WideQueries,
    document_patterns,
    shifted,
)
from hf_efficient_attn.layout.call import cap, join_sinks
from hf_efficient_attn.layout.dense_mask import lse_dtype
from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.layout.tracing import autocast_off, autocast_states
from hf_efficient_attn.patterns.intervals import Intervals, intersect, size

# the number of queries whose scores are in memory at a time
CHUNK_QUERIES = 64


@dataclass(frozen=True)
class WidePart:
    """Wide queries of one document over the keys of one process.

    Attributes:
        examples: the indices of the examples that are the document's sequence.
        rows: places of the queries among the wide queries of the call.
        keys: places of the keys among those of the process.
        allowed: which pairs are allowed, bool [heads or 1, queries, keys].
    """

    examples: Tensor
    rows: Tensor
    keys: Tensor
    allowed: Tensor


def with_wide_queries(out: Tensor, query: Tensor, key: Tensor, value: Tensor, call: ShardedCall) -> Tensor:
    """Return the output [B, H, n, Dv] with the rows of wide queries replaced by the joint result of all processes."""
    device, (first, _), positions = query.device, call.own, call.exchange.wide_positions
    rows = numbers_in(intersect(positions, (call.own,)), device) - first
    places = index_bounds(positions, call.bounds)
    queries = gathered(query.index_select(2, rows), places, call)
    numbers = numbers_in(positions, device)
    parts = tuple(
        wide_part(wide, call.layout, sequence, call.members(sequence, device), numbers, call.own)
        for wide in call.exchange.wide
        for sequence in (call.sequences[wide.sequence],)
    )
    scores = call.scores
    found = attend_wide(queries, key, value, scores.sinks, parts, scores, call.shards.group)
    start, stop = places[call.rank]
    is_wide = torch.zeros(*out.shape[::2], dtype=torch.bool, device=device)
    for part in parts:
        inside = part.rows[(part.rows >= start) & (part.rows < stop)]
        is_wide[part.examples[:, None], (numbers[inside] - first)[None]] = True
    replaced = torch.zeros_like(out).index_copy(2, rows, found[:, :, start:stop])
    return torch.where(is_wide[:, None, :, None], replaced, out)


def gathered(own: Tensor, places: Bounds, call: ShardedCall) -> Tensor:
    """Return the wide queries of all processes, given those of this process, [B, H, w, D], and the places of all."""
    everything = ((0, places[-1][1]),)
    route = route_of(call.rank, places, [everything] * len(places))
    sent = cut_tokens(own, route.slices).permute(2, 0, 1, 3)
    received = exchanged(sent, route.num_sent, route.num_received, call.shards.group).permute(1, 2, 0, 3)
    num_before = places[call.rank][0]
    return torch.cat((received[:, :, :num_before], own, received[:, :, num_before:]), 2)


def index_bounds(positions: Intervals, bounds: Bounds) -> Bounds:
    """Return the range of places, among some positions, that each process holds.

    >>> index_bounds(((0, 2), (5, 6)), ((0, 3), (3, 6)))
    ((0, 2), (2, 3))
    """
    edges = [0]
    for own in bounds:
        edges.append(edges[-1] + size(intersect(positions, (own,))))
    return tuple(zip(edges, edges[1:], strict=False))


def numbers_in(intervals: Intervals, device: torch.device) -> Tensor:
    """Return the positions in the intervals, int64."""
    ranges = [torch.arange(start, stop) for start, stop in intervals]
    return torch.cat([torch.zeros(0, dtype=torch.int64), *ranges]).to(device)


def wide_part(
    wide: WideQueries,
    layout: Layout,
    sequence: TokenSequence,
    examples: Tensor,
    row_positions: Tensor,
    own: tuple[int, int],
) -> WidePart:
    """Return the keys of a process, at the positions `own`, that wide queries attend to.

    row_positions: the positions of all wide queries.
    """
    device, start = row_positions.device, wide.document.start
    keys = intersect(sequence.tokens, intersect((own,), ((start, wide.document.stop),)))
    queries = intersect(wide.positions, sequence.tokens)
    query, key = (numbers_in(shifted(each, -start), device) for each in (queries, keys))
    allowed: dict[Any, Tensor] = {}
    patterns = document_patterns(layout, wide.document)
    for pattern in patterns:
        if pattern not in allowed:
            tabled = pattern.with_tables(partial(torch.tensor, device=device))
            found = tabled.allowed(query[:, None], key[None])
            allowed[pattern] = found.expand(len(query), len(key))
    stacked = [allowed[patterns[0]]] if len(allowed) == 1 else [allowed[pattern] for pattern in patterns]
    rows = torch.searchsorted(row_positions, query + start)
    return WidePart(examples, rows, key + start - own[0], torch.stack(stacked))


def attend_wide(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, parts: tuple[WidePart, ...], scores: Scores, group: Any
) -> Tensor:
    """Return the result of `WideAttention`, in the dtype of autocast if it is on, like attention of other queries."""
    q, k, v = autocast_states(q, k, v)
    with autocast_off(q.device.type):
        out: Tensor = WideAttention.apply(q, k, v, sinks, parts, scores, group)
    return out


class WideAttention(torch.autograd.Function):
    """Attention of wide queries over the keys of all processes: q [B, H, W, D], own k and v → [B, H, W, Dv].

    Every process has the same queries. The output gradient that a process gets is only that of its own queries; the
    gradient of q that it returns is only the part from its own keys.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, parts: tuple[WidePart, ...],
        scores: Scores, group: Any,
    ) -> Tensor:  # fmt: skip
        dtype = lse_dtype(q)
        out = q.new_zeros(*q.shape[:3], v.shape[3], dtype=dtype)
        lse = q.new_full(q.shape[:3], -torch.inf, dtype=dtype)
        # the rank is part of the seed, so that processes with the same random state drop different places
        ctx.seed = int(torch.randint(2**62, ())) + 2**32 * distributed.get_rank(group) if scores.dropout else 0
        for number, (part, rows) in enumerate(pieces_of(parts)):
            logits, values = scores_of(q, k, v, part, rows, scores)
            own = torch.logsumexp(logits, -1)
            weights = torch.exp(logits - own.masked_fill(own == -torch.inf, 0.0)[..., None])
            weights = dropped(weights, scores.dropout, ctx.seed + number)
            place = (part.examples[:, None], slice(None), part.rows[rows][None])
            # indexing with tensors on both sides of a slice moves the heads last
            out[place] = (weights @ values).transpose(1, 2)
            lse[place] = own.transpose(1, 2)
        out, lse = join_processes(out, lse, group)
        if sinks is not None:
            out, lse = join_sinks(out, lse, sinks)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.parts, ctx.scores, ctx.group = parts, scores, group
        return out.to(q.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        scores: Scores = ctx.scores
        own = gradient.to(out.dtype)
        d_sinks = None
        if sinks is not None:
            weights = torch.exp(sinks.to(lse.dtype)[:, None] - lse.masked_fill(lse == -torch.inf, torch.inf))
            d_sinks = -(weights * (own * out).sum(-1)).sum((0, 2)).to(sinks.dtype)
        grad = summed(own.contiguous(), ctx.group)
        delta = (grad * out).sum(-1, keepdim=True)
        lse = lse.masked_fill(lse == -torch.inf, torch.inf)[..., None]
        dq, dk, dv = (torch.zeros_like(each, dtype=out.dtype) for each in (q, k, v))
        repeats = q.shape[1] // k.shape[1]
        for number, (part, rows) in enumerate(pieces_of(ctx.parts)):
            logits, values, queries, keys, slope = scores_of(q, k, v, part, rows, scores, for_gradients=True)
            at = (part.examples[:, None], slice(None), part.rows[rows][None])
            to_keys = (part.examples[:, None], slice(None), part.keys[None])
            d_out, own_delta, own_lse = (each[at].transpose(1, 2) for each in (grad, delta, lse))
            weights = torch.exp(logits - own_lse)
            d_weights = dropped(d_out @ values.transpose(-1, -2), scores.dropout, ctx.seed + number)
            used = dropped(weights, scores.dropout, ctx.seed + number)
            d_logits = weights * (d_weights - own_delta) * slope * scores.scale
            dq[at] += (d_logits @ keys).transpose(1, 2)
            for total, found in ((dk, d_logits.transpose(-1, -2) @ queries), (dv, used.transpose(-1, -2) @ d_out)):
                total[to_keys] += found.unflatten(1, (-1, repeats)).sum(2).transpose(1, 2)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), d_sinks, None, None, None


def pieces_of(parts: tuple[WidePart, ...]) -> Iterator[tuple[WidePart, slice]]:
    """Yield every part with a few of its queries at a time."""
    for part in parts:
        for first in range(0, len(part.rows), CHUNK_QUERIES):
            yield part, slice(first, first + CHUNK_QUERIES)


def scores_of(
    q: Tensor, k: Tensor, v: Tensor, part: WidePart, rows: slice, scores: Scores, for_gradients: bool = False
) -> Any:
    """Return the scores [b, H, w, K] of some queries of a part, -inf for pairs that are not allowed, and the values.

    for_gradients: also return the queries, the keys, and the derivative of the bounded scores.
    """
    dtype, repeats = lse_dtype(q), q.shape[1] // k.shape[1]
    queries = q[part.examples][:, :, part.rows[rows]].to(dtype)
    keys, values = (each[part.examples][:, :, part.keys].to(dtype).repeat_interleave(repeats, 1) for each in (k, v))
    logits = cap(queries @ keys.transpose(-1, -2) * scores.scale, scores.softcap)
    slope = None
    if for_gradients:
        slope = 1.0 if scores.softcap is None else 1.0 - (logits / scores.softcap).square()
    logits = logits.masked_fill(~part.allowed[..., rows, :], -torch.inf)
    return (logits, values, queries, keys, slope) if for_gradients else (logits, values)


def dropped(weights: Tensor, dropout: float, seed: int) -> Tensor:
    """Return the weights with some of them dropped; the same seed drops the same ones."""
    if not dropout:
        return weights
    generator = torch.Generator(weights.device).manual_seed(seed)
    is_kept = torch.rand(weights.shape, generator=generator, device=weights.device) >= dropout
    return weights * is_kept / (1.0 - dropout)


def join_processes(out: Tensor, lse: Tensor, group: Any) -> tuple[Tensor, Tensor]:
    """Return the outputs [B, H, W, Dv] and log-sum-exp [B, H, W] over the keys of all processes together."""
    highest = largest(lse, group)
    # a query without any key has output 0
    highest = highest.masked_fill(highest == -torch.inf, 0.0)
    weight = torch.exp(lse - highest)
    total = summed(torch.cat((out * weight[..., None], weight[..., None]), -1), group)
    out, weight = total[..., :-1], total[..., -1]
    return out / weight.masked_fill(weight == 0.0, 1.0)[..., None], torch.log(weight) + highest
