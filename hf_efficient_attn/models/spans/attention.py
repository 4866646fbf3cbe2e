"""Attention in which every head attends only as far as its span; keys beyond it are not computed.

Heads whose spans end in the same chunk are computed together. Each group attends to a band that is as wide as its heads
need, with the same kernels as any pattern. Without a table of relative positions and without attention dropout, nothing
is added to the scores within a span, so only the keys around the ramp need the slower kernel for terms.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.attention.build_call import LayerPattern, QueryOffset
from hf_efficient_attn.attention.explanation import LayerRequest
from hf_efficient_attn.attention.layer import attend_layer, check_matrix
from hf_efficient_attn.attention.select import AUTO, preferred_backend
from hf_efficient_attn.attention.sharded.shards import SequenceShards, shards_of
from hf_efficient_attn.layout.score_terms import Distance, Label, SoftSpan, Term
from hf_efficient_attn.layout.token_mask import NO_MASK, TokenMask
from hf_efficient_attn.layout.transfer import device_numbers
from hf_efficient_attn.models.inputs import LayerInputs
from hf_efficient_attn.models.prologue import PreparedCall
from hf_efficient_attn.models.spans.config import SpanGroup, SpanWindow, checked_window, groups_of, span_groups
from hf_efficient_attn.models.spans.long_blocks import (
    BLOCK_TOKENS,
    LongBlocks,
    apart,
    attend_nearest,
    keys_before,
    put_rows,
    rows_of,
)
from hf_efficient_attn.models.spans.module import DYNAMIC, FIXED, SpanBounds, Spans, bounds_of
from hf_efficient_attn.patterns.algebra import PerHead


@dataclass(frozen=True)
class SpanInputs(LayerInputs):
    """Inputs of layers with spans.

    Attributes:
        real_tokens: the new tokens over which dynamic spans are averaged, bool [B, T]; None: all.
        bounds: the bounds of each layer's spans, if known.
    """

    real_tokens: Tensor | None = None
    bounds: Sequence[SpanBounds | None] | None = None


ALL_TOKENS = SpanInputs()


def span_inputs(call: PreparedCall, model: Any, bounds: Sequence[SpanBounds | None]) -> SpanInputs:
    """Return the inputs of a backbone's layers for a call, given the bounds of their spans."""
    masks = call.masks(model.config)
    real_tokens = call.own_real_tokens(masks.token_mask, shards_of(model))
    return SpanInputs(masks.token_mask, masks.query_offset, masks.matrix, real_tokens, bounds)


def attend_spans(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: Tensor | None,
    window: SpanWindow,
    token_mask: TokenMask,
    scale: float,
    dropout: float = 0.0,
    position_table: Tensor | None = None,
    bounds: SpanBounds | None = None,
    layer_idx: int = 0,
    matrix: Tensor | None = None,
    query_offset: QueryOffset = None,
    need_weights: bool = False,
    backend: str = AUTO,
    shards: SequenceShards | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the output [B, T, H, D] and the weights [B, H, T, K] or None.

    Args:
        query: [B, H, T, D].
        key, value: [B, H, K, D].
        spans: in tokens, [1, H, 1] or [B, H, T]; None: every head attends up to the limit.
        position_table: [limit, D], a vector for each distance, the nearest key first, which is added to the keys.
        bounds: bounds of the spans; if given, the spans are not copied from the device.
        matrix: the user's matrix mask, [B or 1, H or 1, T, K].
        query_offset: position of the first query among the K; None: the queries are the last ones.
        need_weights: compute densely and return the weights.
        shards: the processes that share each text; None: this one has the whole text.
    """
    bounds = bounds_of(spans, None, layer_idx) if bounds is None else bounds
    # with a token mask, keys may follow the queries; a user's matrix and the weights have a column for each key
    is_cut = token_mask.is_empty and matrix is None and window.is_causal and not need_weights
    bounds, calls = without_long(bounds, spans, window, query, key) if is_cut and shards is None else (bounds, [])
    groups = groups_of(spans, bounds, window, query, token_mask, shards)
    if is_cut and is_lone_query(query, key, window, backend):
        return attend_nearest(query, key, value, spans, bounds, window, groups, scale, dropout, position_table), None
    is_per_head = has_heads(matrix, query, key)
    options: dict[str, Any] = {"scale": scale, "dropout": dropout, "backend": backend}
    outputs, weights = [], []
    for group in groups:
        is_all = len(group.heads) == query.shape[1]
        heads = range(query.shape[1]) if is_all else group.heads
        kept = slice(-group.num_keys - window.shift - query.shape[2] + 1 if is_cut else None, None)
        q, k, v = pick(query, heads), pick(key[:, :, kept], heads), pick(value[:, :, kept], heads)
        own = spans if spans is None or is_all else pick(spans, heads)
        layer_spec = LayerPattern(
            window.band(group.num_keys), layer_idx, is_own=False, is_causal=window.is_causal, shards=shards
        )
        own_matrix = pick(matrix, heads) if is_per_head else matrix
        terms = terms_of(q, own, window, group, position_table, scale)
        masks = {"tokens": token_mask, "query_offset": query_offset, "matrix": own_matrix}
        out, weight = attend_layer(q, k, v, layer_spec, terms=terms, need_weights=need_weights, **masks, **options)
        outputs.append(out)
        weights.append(weight)
    places = [head for group in groups for head in group.heads]
    order = sorted(range(len(places)), key=places.__getitem__)
    out = with_long(in_order(outputs, 2, order), calls, (query, key, value, spans), position_table, window, **options)
    return out, in_order(weights, 1, order) if need_weights else None


def without_long(
    bounds: SpanBounds | None, spans: Tensor | None, window: SpanWindow, query: Tensor, key: Tensor
) -> tuple[SpanBounds | None, list[LongBlocks]]:
    """Return the bounds of spans and, for dynamic spans, the long blocks that are computed separately; see `apart`."""
    if spans is None or spans.shape[2] < 2 * BLOCK_TOKENS or spans.device.type != "cpu":
        return bounds, []
    if torch.compiler.is_compiling():
        return bounds, []
    # all examples may share the spans of one
    per_example = spans.expand(query.shape[0], -1, -1)
    return apart(per_example, window, key.shape[2] - query.shape[2]) or (bounds, [])


def with_long(
    out: Tensor,
    calls: Sequence[LongBlocks],
    states: tuple[Tensor, Tensor, Tensor, Any],
    position_table: Tensor | None,
    window: SpanWindow,
    **options: Any,
) -> Tensor:
    """Return the output [B, T, H, D] with the long blocks computed again, over all of their keys.

    states: queries, keys, values and spans.
    """
    query, key, value, spans = states
    for blocks in calls:
        rows = torch.tensor(blocks.rows)
        q, own = rows_of(query, rows), rows_of(spans.expand(query.shape[0], -1, -1), rows)
        k, v = (keys_before(each, rows, blocks.num_before, query.shape[2]) for each in (key, value))
        terms = terms_of(q, own, window, blocks.group, position_table, options["scale"])
        layer_spec = LayerPattern(window.band(blocks.group.num_keys), is_own=False, is_causal=True)
        found, _ = attend_layer(q, k, v, layer_spec, tokens=NO_MASK, terms=terms, **options)
        out = put_rows(out, found, rows)
    return out


def has_heads(matrix: Tensor | None, query: Tensor, key: Tensor) -> bool:
    """Return whether a user's mask has one matrix per head; raise InputError if its shape is wrong."""
    if matrix is None:
        return False
    check_matrix("attention_mask", matrix, (*query.shape[:3], key.shape[2]))
    return matrix.shape[1] > 1


def within_reach(memory: Tensor, bounds: SpanBounds | None, is_dynamic: bool, window: SpanWindow) -> Tensor:
    """Return the part of the memory that any head attends to, [B, C, hidden_size].

    Dynamic spans are not known before they are computed, so the memory holds `span_limit` tokens. For other spans it
    holds little more than they reach, so it is returned as it is.
    """
    if bounds is None or not is_dynamic or torch.compiler.is_compiling():
        return memory
    reach = window.num_keys(max(bounds.highest)) - 1 + window.shift
    return memory[:, max(0, memory.shape[1] - reach) :]


def pick(tensor: Tensor, heads: Sequence[int]) -> Tensor:
    """Return these heads of a tensor [B, H, ...]; a view if their indices are consecutive."""
    first, last = heads[0], heads[-1]
    if last - first + 1 == len(heads):
        return tensor[:, first : last + 1]
    return tensor.index_select(1, device_numbers(tuple(heads), tensor.device))


def in_order(parts: list[Tensor], dim: int, order: list[int]) -> Tensor:
    """Return the parts concatenated along a dimension, and sorted in this order."""
    joined = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    is_sorted = order == list(range(len(order)))
    return joined if is_sorted else joined.index_select(dim, device_numbers(tuple(order), joined.device))


def is_lone_query(query: Tensor, key: Tensor, window: SpanWindow, backend: str) -> bool:
    """Return whether there is a single query that has keys, as in decoding, without a chosen backend or a compiler."""
    is_free = backend == preferred_backend() == AUTO and not torch.compiler.is_compiling()
    return is_free and query.shape[2] == 1 and key.shape[2] > window.shift


def terms_of(
    query: Tensor,
    spans: Tensor | None,
    window: SpanWindow,
    group: SpanGroup,
    position_table: Tensor | None,
    scale: float,
) -> tuple[Term, ...]:
    """Return the terms of a group's scores: the products with the position table, and the log of the soft mask."""
    terms = []
    if position_table is not None:
        values = query @ position_table[: group.num_keys].to(query.dtype).T * scale
        terms.append(Term(values, Distance(window.shift, group.num_keys - 1 + window.shift)))
    if spans is not None and group.num_inner < group.num_keys:
        terms.append(Term(spans[..., None], SoftSpan(window.ramp, window.shift, group.num_inner)))
    return tuple(terms)


# The request of a layer with spans to the engine, shown by `explain` as one call for all heads, each with its band.


RAMPS = "Pairs on the ramps at the ends of spans cost more, which is not counted."
LIMITS = "A config has no learned spans: span_limit is used for every head."
MEANS = "Each token has its own span: the mean over the last text is used, or the initial value if there was none."


def span_request(module: Any, spans: Spans, num_keys: int, has_table: bool = False) -> LayerRequest:
    """Return the request of a layer's attention module to the engine for this number of tokens.

    Args:
        has_table: whether the scores have a table of relative positions.
    """
    window, num_heads = checked_window(module.config, spans), module.num_heads
    found = tuple(spans.head_spans().tolist())
    if spans.kind == FIXED or spans.is_away:
        groups = [SpanGroup(tuple(range(num_heads)), window.limit, window.limit)]
    else:
        groups = span_groups(found, found, window, num_keys)
    bands = {head: window.band(group.num_keys) for group in groups for head in group.heads}
    pattern = PerHead([bands[head] for head in range(num_heads)]) if len(groups) > 1 else bands[0]
    labels: tuple[Label, ...] = ()
    if has_table:
        labels = (Distance(window.shift, window.limit - 1 + window.shift),)
    layer_spec = LayerPattern(pattern, spans.layer_idx, is_own=True, is_causal=window.is_causal)
    request: LayerRequest = module.request(layer_spec, labels=labels, notes=_notes(spans, groups))
    return request


def _notes(spans: Spans, groups: list[SpanGroup]) -> tuple[str, ...]:
    if spans.kind == FIXED:
        return ()
    if spans.is_away:
        return (LIMITS,)
    has_ramps = any(group.num_inner < group.num_keys for group in groups)
    return (*([MEANS] if spans.kind == DYNAMIC else []), *([RAMPS] if has_ramps else []))
