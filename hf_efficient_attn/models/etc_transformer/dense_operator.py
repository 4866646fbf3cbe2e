"""Tiles of queries over all pairs as custom operators, opaque to `torch.compile`: a compiler joins no tiles of them.

Shapes are those of `dense_piece.py`.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.backends.kernels import dropper, wide_dtype
from hf_efficient_attn.errors import UnsupportedBackendError
from hf_efficient_attn.layout.tracing import autocast_off

# a CUDA graph would replay the dropout of its first run
TAGS = (torch.Tag.cudagraph_unsafe,)
# scores of a tile: 4 MiB of float32, about what a core's caches hold
TILE_SCORES = 1 << 20


def tiles(query: Tensor, key: Tensor) -> list[slice]:
    """Return the tiles of queries: one if there are few pairs."""
    batch, heads, num_queries, _ = query.shape
    rows = max(1, TILE_SCORES // max(1, batch * heads * key.shape[2]))
    return [slice(first, first + rows) for first in range(0, num_queries, rows)] or [slice(None)]


def added_to_scores(values: list[Tensor], labels: list[Tensor], part: slice) -> Tensor | None:
    """Return what is added to the scores of some queries, [B, H, q, K]; None: nothing."""
    found = []
    for value, label in zip(values, labels, strict=True):
        value, label = value[:, :, part], label[:, :, part]
        if label.dtype == torch.bool:
            found.append(torch.where(label, value[..., 1:], value[..., :1]))
        else:
            found.append(value.gather(-1, label.expand(*value.shape[:3], -1)))
    return torch.cat(found, -1) if found else None


def scores_of(query: Tensor, key: Tensor, added: Tensor | None, allowed: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return the scores of queries, with -inf where a query reads a key of others, and which queries read any key."""
    scores = (query @ key.mT).to(wide_dtype(query.dtype)) * scale
    scores = scores if added is None else scores + added
    has_keys = allowed.any(-1, keepdim=True)
    # the softmax of nothing but -inf would be NaN, and so would its gradient
    return scores.masked_fill(~allowed & has_keys, -torch.inf), has_keys


@torch.library.custom_op("hf_efficient_attn::dense_tiles", mutates_args=(), tags=TAGS)
def dense_tiles(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    values: list[Tensor],
    labels: list[Tensor],
    allowed: Tensor,
    seed: Tensor | None,
    scale: float,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    """Return outputs and log-sum-exps; see `attend_pairs`.

    seed: int64 scalar on the CPU, needed with dropout.
    """
    outs, lses = [], []
    with autocast_off(query.device.type):
        for part, drop in _each_tile(query, key, seed, dropout):
            added = added_to_scores(values, labels, part)
            scores, has_keys = scores_of(query[:, :, part], key, added, allowed[:, :, part], scale)
            lse = scores.logsumexp(-1, keepdim=True)
            weights = (scores - lse).exp_().masked_fill_(~has_keys, 0.0)
            lses.append(lse.masked_fill(~has_keys, -torch.inf)[..., 0])
            outs.append(_dropped(weights, drop, dropout).to(value.dtype) @ value)
    return torch.cat(outs, 2), torch.cat(lses, 2)


@torch.library.custom_op("hf_efficient_attn::dense_tiles_backward", mutates_args=(), tags=TAGS)
def dense_tiles_backward(
    grad: Tensor,
    grad_lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lse: Tensor,
    values: list[Tensor],
    labels: list[Tensor],
    allowed: Tensor,
    seed: Tensor | None,
    scale: float,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Return the gradients of query, key, value, and of the values of labels."""
    wide, d_query = lse.dtype, query.new_empty(query.shape)
    d_key, d_value = (torch.zeros(each.shape, dtype=wide, device=each.device) for each in (key, value))
    d_values = [each.new_empty(each.shape) for each in values]
    with autocast_off(query.device.type):
        for part, drop in _each_tile(query, key, seed, dropout):
            q, given = query[:, :, part], grad[:, :, part]
            scores, has_keys = scores_of(q, key, added_to_scores(values, labels, part), allowed[:, :, part], scale)
            weights = (scores - lse[:, :, part, None]).exp_().masked_fill_(~has_keys, 0.0)
            d_value += _dropped(weights, drop, dropout).to(given.dtype).mT @ given
            d_weights = _dropped((given @ value.mT).to(wide), drop, dropout)
            delta = (d_weights * weights).sum(-1, keepdim=True) - grad_lse[:, :, part, None]
            d_scores = d_weights.sub_(delta).mul_(weights)
            _add_labels([each[:, :, part] for each in d_values], labels, part, d_scores)
            narrow = (d_scores * scale).to(q.dtype)
            d_query[:, :, part] = narrow @ key
            d_key += narrow.mT @ q
    return d_query, d_key.to(key.dtype), d_value.to(value.dtype), d_values


def _each_tile(query: Tensor, key: Tensor, seed: Tensor | None, dropout: float) -> Iterator[tuple[slice, Any]]:
    """Yield each tile of queries and what draws its dropped weights, or None."""
    first = 0 if seed is None else int(seed)
    for number, part in enumerate(tiles(query, key)):
        yield part, dropper(dropout, first + number, query.device)


def _dropped(weights: Tensor, drop: Any, dropout: float) -> Tensor:
    return weights if drop is None else weights.masked_fill(drop(tuple(weights.shape)), 0.0) / (1.0 - dropout)


def _add_labels(d_values: list[Tensor], labels: list[Tensor], part: slice, d_scores: Tensor) -> None:
    """Write the gradients of the values of some queries, from those of their scores."""
    first = 0
    for d_value, label in zip(d_values, labels, strict=True):
        label = label[:, :, part]
        own = d_scores[..., first : first + label.shape[3]]
        first += label.shape[3]
        if label.dtype == torch.bool:
            together = own.masked_fill(~label, 0.0).sum(-1)
            d_value.copy_(torch.stack((own.sum(-1) - together, together), -1))
        else:
            index = label.expand(*own.shape[:3], -1)
            d_value.copy_(torch.zeros_like(d_value, dtype=own.dtype).scatter_add_(-1, index, own))


@dense_tiles.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    out = value.new_empty(*query.shape[:3], value.shape[3])
    return out, query.new_empty(query.shape[:3], dtype=wide_dtype(query.dtype))


@dense_tiles_backward.register_fake
def _(
    grad: Tensor,
    grad_lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lse: Tensor,
    values: list[Tensor],
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    d_query, d_key, d_value, *d_values = (each.new_empty(each.shape) for each in (query, key, value, *values))
    return d_query, d_key, d_value, d_values


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, values, labels, allowed, seed, *ctx.settings = inputs
    ctx.num_parts = len(values)
    ctx.save_for_backward(query, key, value, output[1], allowed, seed, *values, *labels)


def _backward(ctx: Any, grad: Tensor, grad_lse: Tensor) -> tuple[Any, ...]:
    query, key, value, lse, allowed, seed, *rest = ctx.saved_tensors
    values, labels = rest[: ctx.num_parts], rest[ctx.num_parts :]
    found = dense_tiles_backward(grad, grad_lse, query, key, value, lse, values, labels, allowed, seed, *ctx.settings)
    return *found, [None] * len(labels), None, None, None, None


def _no_double_backward(ctx: Any, *grads: Any) -> None:
    raise UnsupportedBackendError(
        "ETC's pieces with global tokens have no second derivative (create_graph=True, autograd.functional.hessian, "
        "...) while compiling, or of long texts. Use shorter ones without torch.compile."
    )


dense_tiles.register_autograd(_backward, setup_context=_setup_context)
dense_tiles_backward.register_autograd(_no_double_backward)
