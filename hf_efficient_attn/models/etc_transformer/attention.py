"""The attention of ETC: four pieces under two softmaxes, with a learned part of the scores for each label.

A long token attends to a band of long tokens and to all global tokens, in one softmax. A global token attends to all
global tokens and all long tokens, in another. The score of query i and key j is

    (qᵢ · (kⱼ + a_label(i, j)) + b_label(i, j)) / √d

Each label has a vector a and a number b per head. Long queries and global queries have separate tables.

The engine computes the band, with the labels of distances as a term, so its cost is the cost of the pattern. The other
three pieces have all n_g · (n_g + 2n) pairs; their labels and masks depend on the content of the text, not only on
positions. They are computed as matrix products, in tiles. The two pieces of a long token are combined by their
log-sum-exp.

Shapes: B rows, T long tokens, G global tokens, H heads, D head size. Source: Ainslie et al. (arXiv:2004.08483),
section 3.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout as drop
from transformers import initialization as init

from hf_efficient_attn.attention.build_call import LayerPattern
from hf_efficient_attn.attention.explanation import LayerRequest
from hf_efficient_attn.attention.functional import attention
from hf_efficient_attn.attention.joined import join_attention
from hf_efficient_attn.attention.layer import attend_layer, selected_rows
from hf_efficient_attn.backends.kernels import dropper, wide_dtype
from hf_efficient_attn.errors import UnsupportedBackendError
from hf_efficient_attn.integration.layer_patterns import layer_pattern
from hf_efficient_attn.layout.score_terms import Distance, Term
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.layout.tracing import autocast_off, is_exporting
from hf_efficient_attn.layout.transfer import device_numbers
from hf_efficient_attn.models.base import backend_of
from hf_efficient_attn.models.parts.attention import MultiHeadAttention
from hf_efficient_attn.models.parts.blocks import drop_rate
from hf_efficient_attn.patterns.bands import Band

from .global_input import LINKED, NOT_LINKED, Structure, labels_by_distance

# Dense attention in tiles of queries, as custom operators that are opaque to `torch.compile`, so it cannot fuse tiles.
#
# Shapes: B rows, H heads, Q queries, K keys, D head size.


# a CUDA graph would replay the dropout of its first call
TAGS = (torch.Tag.cudagraph_unsafe,)
# scores of a tile: 4 MiB in float32, about the size of a core's caches
TILE_SCORES = 1 << 20


def tiles(query: Tensor, key: Tensor) -> list[slice]:
    """Return the tiles of queries; a single one if there are few pairs."""
    batch, heads, num_queries, _ = query.shape
    rows = max(1, TILE_SCORES // max(1, batch * heads * key.shape[2]))
    return [slice(first, first + rows) for first in range(0, num_queries, rows)] or [slice(None)]


def added_to_scores(values: list[Tensor], labels: list[Tensor], part: slice) -> Tensor | None:
    """Return what is added to the scores of these queries, [B, H, q, K]; None: nothing."""
    found = []
    for value, label in zip(values, labels, strict=True):
        value, label = value[:, :, part], label[:, :, part]
        if label.dtype == torch.bool:
            found.append(torch.where(label, value[..., 1:], value[..., :1]))
        else:
            found.append(value.gather(-1, label.expand(*value.shape[:3], -1)))
    return torch.cat(found, -1) if found else None


def scores_of(query: Tensor, key: Tensor, added: Tensor | None, allowed: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return the scores, with -inf for pairs that are not allowed, and which queries have any key.

    Queries without keys keep finite scores.
    """
    scores = (query @ key.mT).to(wide_dtype(query.dtype)) * scale
    scores = scores if added is None else scores + added
    has_keys = allowed.any(-1, keepdim=True)
    # if all scores of a query were -inf, its softmax and the gradient would be NaN
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
    """Return the outputs and log-sum-exps; see `attend_pairs`.

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
    """Return the gradients of query, key, value and the label values."""
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
    """Yield each tile of queries and the function that draws its dropout mask, or None."""
    first = 0 if seed is None else int(seed)
    for number, part in enumerate(tiles(query, key)):
        yield part, dropper(dropout, first + number, query.device)


def _dropped(weights: Tensor, drop: Any, dropout: float) -> Tensor:
    return weights if drop is None else weights.masked_fill(drop(tuple(weights.shape)), 0.0) / (1.0 - dropout)


def _add_labels(d_values: list[Tensor], labels: list[Tensor], part: slice, d_scores: Tensor) -> None:
    """Write the gradients of the label values of these queries, given the gradients of their scores."""
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
        "ETC attention has no second derivative (create_graph=True, autograd.functional.hessian, ...) under "
        "torch.compile or for long texts. Use shorter texts without torch.compile."
    )


dense_tiles.register_autograd(_backward, setup_context=_setup_context)
dense_tiles_backward.register_autograd(_no_double_backward)


# The pieces of ETC's attention that compute all pairs, with masks and labels that depend on the content of the text.
#
# Long texts, and all texts of compiled models, are computed in tiles of queries. The backward pass computes the scores
# of a tile again, so only one tile of scores is in memory at a time. The states that a layer keeps grow with the number
# of tokens. For the pairs with global tokens, only the tables of `Structure` are kept, once for all layers.
#
# Shapes: B rows, H heads, Q queries, K keys, D head size.


# what is added to the scores of some keys: the value of each label, [B, H, Q, labels], and the label of each pair,
# [B or 1, 1, Q, keys], as integers, or as bools if there are two labels
Labelled = tuple[Tensor, Tensor]


def attend_pairs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    added: tuple[Labelled, ...],
    allowed: Tensor,
    scale: float,
    dropout: float,
    need_weights: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the outputs [B, H, Q, D], the log-sum-exps [B, H, Q] and, if needed, the weights [B, H, Q, K].

    For queries without keys they are 0, -inf and 0. Softmax and log-sum-exp are computed in float32 or float64.

    Args:
        query, key, value: [B, H, Q, D] and [B, H, K, D].
        added: what is added to the scores, in consecutive parts that cover all keys; empty: nothing.
        allowed: True = the query attends to the key; [B or 1, 1, Q, K].
        dropout: dropout probability of the weights.
    """
    values, labels = ([each[index] for each in added] for index in (0, 1))
    if _is_tiled(query, key) and not need_weights:
        seed = torch.randint(2**62, (), dtype=torch.int64) if dropout > 0.0 else None
        out, lse = dense_tiles(query, key, value, values, labels, allowed, seed, scale, dropout)
        return out, lse, None
    scores, has_keys = scores_of(query, key, added_to_scores(values, labels, slice(None)), allowed, scale)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.unsqueeze(-1)).exp().masked_fill(~has_keys, 0.0)
    lse = torch.where(has_keys[..., 0], lse, -torch.inf)
    return drop(weights, dropout).to(value.dtype) @ value, lse, weights if need_weights else None


def _is_tiled(query: Tensor, key: Tensor) -> bool:
    """Return whether to compute in tiles, which compute scores twice: for long texts, and always while compiling."""
    if is_exporting():
        # other runtimes do not have the custom operator
        return False
    return torch.compiler.is_compiling() or len(tiles(query, key)) > 1


KeysAndValues = tuple[Tensor, Tensor]


class RelativeTable(nn.Module):
    """The vector and the bias of each label, [labels, heads, head_dim] and [labels, heads]."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        size = (config.relative_vocab_size, config.num_attention_heads)
        self.std = config.relative_std
        self.vectors = nn.Parameter(torch.empty(*size, config.head_dim))
        self.biases = nn.Parameter(torch.empty(size))

    def initialize(self) -> None:
        """Initialize as the authors do: vectors from a truncated normal distribution, biases with 0."""
        init.trunc_normal_(self.vectors, std=self.std, a=-2 * self.std, b=2 * self.std)
        init.zeros_(self.biases)

    def forward(self, query: Tensor, labels: list[int] | slice, scale: float) -> Tensor:
        """Return what these labels add to the scores of queries, [B, H, N, D] → [B, H, N, labels]."""
        chosen = labels if isinstance(labels, slice) else device_numbers(tuple(labels), query.device, torch.long)
        vectors, biases = self.vectors[chosen], self.biases[chosen]
        products = query @ vectors.permute(1, 2, 0).to(query.dtype)
        return (products + biases.T.unsqueeze(1).to(products.dtype)) * scale


class QuerySide(nn.Module):
    """The projections for the queries of one input, and for the keys and values of both inputs that they attend to."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width = config.hidden_size
        names = ["q_proj", "k_proj", "v_proj"]
        # keys and values of the other input have their own projections only if nothing is shared
        self.has_others = not (config.share_qkv_projections or config.share_kv_projections)
        for name in names + ["other_k_proj", "other_v_proj"] * self.has_others:
            setattr(self, name, nn.Linear(width, width, bias=config.attention_bias))
        self.head_dim = config.head_dim

    def heads(self, states: Tensor) -> Tensor:
        """Return [B, N, H · D] as [B, H, N, D]."""
        return states.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def queries(self, states: Tensor) -> Tensor:
        """Return the queries of this input."""
        return self.heads(self.q_proj(states))

    def own(self, states: Tensor) -> KeysAndValues:
        """Return the keys and values of this input."""
        return self.heads(self.k_proj(states)), self.heads(self.v_proj(states))

    def other(self, states: Tensor) -> KeysAndValues:
        """Return the keys and values of the other input."""
        if not self.has_others:
            return self.own(states)
        return self.heads(self.other_k_proj(states)), self.heads(self.other_v_proj(states))


class EtcAttention(MultiHeadAttention):
    """The attention of a layer: long tokens [B, T, hidden_size] and global tokens [B, G, hidden_size] → the same."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx, is_causal=False)
        self.band = Band(config.local_radius, config.local_radius)
        self.long_side = QuerySide(config)
        self.global_side = None if config.share_qkv_projections else QuerySide(config)
        self.o_proj, global_o_proj = (
            nn.Linear(config.hidden_size, config.hidden_size, bias=config.attention_output_bias) if each else None
            for each in (True, not config.share_output_projection)
        )
        self.global_o_proj = global_o_proj
        has_labels = config.relative_vocab_size is not None
        self.long_labels, self.global_labels = (RelativeTable(config) if has_labels else None for _ in range(2))

    def forward(
        self, long: Tensor, globals_: Tensor, structure: Structure, token_mask: TokenMask, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """Return output and weights of the long tokens, then output and weights of the global tokens.

        The weights are [B, H, T, G + T] and [B, H, G, G + T], with the global tokens first, or None. They are computed
        densely: both with `output_attentions`, only those of global tokens with `output_global_attentions`.
        """
        side = self.long_side if self.global_side is None else self.global_side
        near, to_global = self.long_side.own(long), self.long_side.other(globals_)
        among, to_long = (to_global, near) if self.global_side is None else (side.own(globals_), side.other(long))
        need_weights = self.needs_weights(kwargs)
        need_global = bool(kwargs.get("output_global_attentions", False)) or need_weights
        query, global_query = self.long_side.queries(long), side.queries(globals_)
        out, weights = self.read_long(query, near, to_global, structure, token_mask, need_weights)
        global_out, global_weights = self.read_all(global_query, among, to_long, structure, need_global)
        global_map = self.o_proj if self.global_o_proj is None else self.global_o_proj
        out, global_out = (each.transpose(1, 2).flatten(2) for each in (out, global_out))
        return self.o_proj(out), weights, global_map(global_out), global_weights

    def read_long(
        self,
        query: Tensor,
        near: KeysAndValues,
        to_global: KeysAndValues,
        structure: Structure,
        token_mask: TokenMask,
        need_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the attention output of the long tokens over their band and all global tokens, and the weights."""
        layer_spec, terms, rate = self.layer_spec(), self.terms(query), drop_rate(self.dropout)
        options: dict[str, Any] = {"scale": self.scaling, "dropout": rate, "backend": backend_of(self.config)}
        masks = {"key_mask": token_mask.key_mask, "segment_ids": token_mask.segment_ids}
        lse_options = {"return_lse": True, "lse_gradient": True}
        where = {"layer": layer_spec.layer, **masks, **options, **lse_options}
        part: Any = attention(query, *near, layer_spec.pattern, terms=terms, **where)
        added = self.of_links(self.long_labels, query, structure.linked)
        dense: dict[str, Any] = {"scale": self.scaling, "dropout": rate, "need_weights": need_weights}
        *other, other_weights = attend_pairs(query, *to_global, added, structure.long_to_global, **dense)
        out, lse = join_attention((part, (other[0], other[1])))
        if not need_weights:
            return out, None
        options["dropout"] = 0.0
        _, weights = attend_layer(
            query, *near, layer_spec, tokens=token_mask, terms=terms, need_weights=True, **options
        )
        own_share, share = (
            torch.where(lse > -torch.inf, (each - lse).exp(), 0.0).unsqueeze(-1) for each in (part[1], other[1])
        )
        joined = (other_weights * share).to(query.dtype), own_share.to(query.dtype)
        rows = selected_rows()
        if rows is not None:
            joined = (joined[0][:, :, list(rows)], joined[1][:, :, list(rows)])
        return out, torch.cat((joined[0], weights * joined[1]), -1)

    def read_all(
        self,
        query: Tensor,
        among: KeysAndValues,
        to_long: KeysAndValues,
        structure: Structure,
        need_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the attention output of the global tokens over global and long tokens, and the weights."""
        added = self.of_links(self.global_labels, query, structure.linked.transpose(2, 3))
        if self.global_labels is not None and structure.labels is not None:
            added = ((self.global_labels(query, slice(None), self.scaling), structure.labels), *added)
        key, value = (torch.cat(each, 2) for each in zip(among, to_long, strict=True))
        dense: dict[str, Any] = {
            "scale": self.scaling,
            "dropout": drop_rate(self.dropout),
            "need_weights": need_weights,
        }
        out, _, weights = attend_pairs(query, key, value, added, structure.from_global, **dense)
        return out.to(query.dtype), None if weights is None else weights.to(query.dtype)

    def of_links(self, table: RelativeTable | None, query: Tensor, linked: Tensor) -> tuple[Labelled, ...]:
        """Return what is added to scores, depending on whether the long token belongs to the global token."""
        if table is None:
            return ()
        first = 2 * self.config.max_relative_distance
        of_links = slice(first + NOT_LINKED, first + LINKED + 1)
        return ((table(query, of_links, self.scaling), linked),)

    def terms(self, query: Tensor) -> tuple[Term, ...]:
        """Return the labels of distances as a term of the scores."""
        if self.long_labels is None:
            return ()
        reach = self.config.max_relative_distance
        values = self.long_labels(query, labels_by_distance(reach), self.scaling)
        return (Term(values, Distance(-reach, reach)),)

    def layer_spec(self) -> LayerPattern:
        """Return the pattern between long tokens: the config's pattern, or the band of the paper."""
        own = layer_pattern(self, {"is_causal": False})
        return replace(own, pattern=self.band, attends_to_all=False) if own.is_own else own

    def layer_request(self, num_keys: int, task: str | None) -> LayerRequest:
        """Return the request of this layer to the engine for this number of tokens."""
        config, reach = self.config, self.config.max_relative_distance
        num_global = -(-num_keys // config.chunk_tokens)
        besides = num_global * (num_global + 2 * num_keys)
        note = (
            f"A head also computes {besides:,} pairs with {num_global:,} global tokens, one for every "
            f"{config.chunk_tokens} tokens unless a call gives others."
        )
        labels = () if self.long_labels is None else (Distance(-reach, reach),)
        return self.request(self.layer_spec(), labels=labels, notes=(note,))
