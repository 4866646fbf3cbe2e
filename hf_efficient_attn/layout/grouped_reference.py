"""Attention in groups that have their own outputs or labels, computed by its formula; gradients by autograd."""

from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout as drop
from torch.nn.functional import pad

from hf_efficient_attn.layout.call import AttentionCall, join_sinks
from hf_efficient_attn.layout.dense_mask import close_pairs, term_bias
from hf_efficient_attn.layout.layout import first_query
from hf_efficient_attn.layout.score_terms import Term, look_up
from hf_efficient_attn.layout.selected_keys import MEAN, PLACES, in_range, near_places, of_heads


def in_groups(
    scores: Tensor, values: Tensor | None, allowed: Tensor | None, call: AttentionCall
) -> tuple[Tensor, Tensor]:
    """Return the output [B, H, Nq, Dv] and the log-sum-exp [B, H, Nq]; with join="mean", the latter is of all groups.

    Args:
        scores: the scores of all pairs without terms, [B, H, Nq, Nk].
        values: [B, H, Nk, Dv]; None: return the weights [B, H, Nq, Nk] instead of the output.
        allowed: bool that broadcasts to the scores; None: all pairs.
    """
    layout, chosen = call.layout, call.chosen
    groups = chosen.groups()  # type: ignore[union-attr]
    num_queries, num_keys = layout.num_queries, layout.num_keys
    shape = (scores.shape[0], layout.num_heads, -1, -1, -1)
    queries = in_range(groups.queries - first_query(layout, call.query_start), num_queries)
    rows = of_heads(queries, shape[1]).expand(*shape[:4])
    keys = of_heads(in_range(groups.keys, num_keys), shape[1]).expand(*shape[:4])
    open_pairs = torch.ones_like(scores, dtype=torch.bool) if allowed is None else allowed.expand_as(scores)
    if call.terms and chosen.labels_count != PLACES:  # type: ignore[union-attr]
        bias = term_bias(call.terms, layout, call.tokens, scores.device, call.query_start)
        bias, open_pairs = close_pairs(bias, open_pairs)  # type: ignore[arg-type]
        scores = scores + bias
    # an additional row and column for empty places
    pairs = (rows[..., None] * (num_keys + 1) + keys[..., None, :]).flatten(2)
    sizes = rows.shape + keys.shape[-1:]
    logits, is_read = (pad(each, (0, 1, 0, 1)).flatten(2).gather(2, pairs).view(sizes) for each in (scores, open_pairs))
    if chosen.first_place is not None:  # type: ignore[union-attr]
        is_read = is_read & near_places(chosen.first_place, sizes[3], sizes[4], keys.device)  # type: ignore[union-attr]
    if call.terms and chosen.labels_count == PLACES:  # type: ignore[union-attr]
        bias, is_read = close_pairs(reduce(add, (_by_place(term, rows, keys) for term in call.terms)), is_read)
        logits = logits + bias
    has_keys = is_read.any(-1, keepdim=True)
    weights = torch.softmax(logits.masked_fill(~is_read & has_keys, -torch.inf), -1).masked_fill(~is_read, 0.0)
    lse = logits.masked_fill(~is_read & has_keys, -torch.inf).logsumexp(-1).masked_fill(~has_keys[..., 0], -torch.inf)
    outs = _summed(drop(weights, call.dropout), values, keys, num_keys)
    return _joined(outs.flatten(2, 3), lse.flatten(2), rows.flatten(2), call)


def _summed(weights: Tensor, values: Tensor | None, keys: Tensor, num_keys: int) -> Tensor:
    """Return the output [B, H, groups, places, Dv] of each place of a query, or its weights over all keys."""
    if values is None:
        none = weights.new_zeros(*weights.shape[:4], num_keys + 1)
        return none.scatter_add(4, keys[:, :, :, None].expand_as(weights), weights)[..., :-1]
    read = pad(values, (0, 0, 0, 1)).gather(2, keys.flatten(2)[..., None].expand(-1, -1, -1, values.shape[3]))
    return weights @ read.view(*keys.shape, -1)


def _by_place(term: Term, rows: Tensor, keys: Tensor) -> Tensor:
    """Return what a term adds to the scores of the groups if its labels depend on places in a group."""
    labels = term.label.of(
        torch.arange(rows.shape[3], device=rows.device)[:, None], torch.arange(keys.shape[3], device=rows.device)
    )
    values = term.values.expand(*rows.shape[:2], -1, -1)
    if values.shape[2] == 1:
        values = values[:, :, :, None]
    else:
        index = rows.flatten(2)[..., None].expand(-1, -1, -1, values.shape[3])
        values = pad(values, (0, 0, 0, 1)).gather(2, index).view(*rows.shape, -1)
    scores = term.label.score(look_up(values, labels), labels)
    return scores.expand(*rows.shape, keys.shape[3])


def _joined(outs: Tensor, lses: Tensor, rows: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Return the output and log-sum-exp of each query from those of its places in groups.

    Args:
        outs, lses, rows: the output [B, H, places, Dv], log-sum-exp [B, H, places] and query [B, H, places] of each
            place; the query of empty places is `num_queries`.
    """
    num_queries, width = call.layout.num_queries, outs.shape[3]
    lse, shares = joined_shares(lses, rows, num_queries + 1)
    if call.chosen.join == MEAN:  # type: ignore[union-attr]
        counts = torch.zeros_like(lse).scatter_add(2, rows, torch.ones_like(lses))
        shares = 1 / (counts.clamp(min=1) + call.chosen.mean_epsilon).gather(2, rows)  # type: ignore[union-attr]
    index = rows[..., None].expand(-1, -1, -1, width)
    out = outs.new_zeros(*lse.shape, width).scatter_add(2, index, outs * shares[..., None])[:, :, :-1]
    lse = lse[:, :, :-1]
    if call.sinks is not None:
        out, lse = join_sinks(out, lse, call.sinks.to(lse.dtype))
    masked = call.masked_queries
    if masked is not None:
        out, lse = out.masked_fill(masked, 0.0), lse.masked_fill(masked[..., 0], -torch.inf)
    return out, lse


def joined_shares(lses: Tensor, rows: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exp of each row, [B, H, rows], and the share of each place in that of its row, [B, H, places].

    Args:
        lses, rows: the log-sum-exp and the row of every place, [B, H, places].
    """
    sizes = (*lses.shape[:2], num_rows)
    largest = lses.new_full(sizes, -torch.inf).scatter_reduce(2, rows, lses.detach(), "amax")
    largest = largest.masked_fill(largest == -torch.inf, 0.0)
    totals = lses.new_zeros(sizes).scatter_add(2, rows, (lses - largest.gather(2, rows)).exp())
    lse = torch.where(totals > 0, totals, 1.0).log().add(largest).masked_fill(totals == 0, -torch.inf)
    has_keys = lses > -torch.inf
    safe = lse.masked_fill(totals == 0, 0.0).gather(2, rows)
    return lse, torch.where(has_keys, torch.where(has_keys, lses, 0.0) - safe, -torch.inf).exp()


# Keys that are scaled to length 1, as in Reformer, which uses its queries as keys.


# added to the mean square of a key before the root, as in the authors' code
KEY_EPS = 1e-6


def unit(vectors: Tensor) -> Tensor:
    """Return vectors of length 1 in their dtype, computed in float32 at least; vectors near 0 stay shorter."""
    wide = vectors.to(torch.promote_types(vectors.dtype, torch.float32))
    if torch.compiler.is_compiling():
        # a compiler fuses the operations of the gradient by itself
        return (wide * _factor(wide)).to(vectors.dtype)
    return _Unit.apply(wide).to(vectors.dtype)


def _factor(vectors: Tensor) -> Tensor:
    """Return the factors [..., 1] that scale vectors [..., D] to length 1."""
    # the norm reads the vectors once and does not write their squares
    square = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True).square()
    return (square + KEY_EPS * vectors.shape[-1]).rsqrt()


class _Unit(torch.autograd.Function):
    """The product of vectors and their factor, with its gradient in one formula: autograd takes twice as long."""

    @staticmethod
    def forward(vectors: Tensor) -> Tensor:
        return vectors * _factor(vectors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (vectors,) = ctx.saved_tensors
        return unit_gradient(vectors, grad)


def unit_gradient(vectors: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of vectors, given the gradient of `unit(vectors)`; both are float32, or both float64.

    With u = f(x) · x and f = (‖x‖² + ε)^-½, the gradient of x is f · (g − f² · (g · x) · x).
    """
    factor = _factor(vectors)
    along = (grad * vectors).sum(-1, keepdim=True) * factor.square()
    return torch.addcmul(grad, vectors, along, value=-1).mul_(factor)
