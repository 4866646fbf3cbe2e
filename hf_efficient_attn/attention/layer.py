"""The attention of one layer with its pattern and masks, or with a matrix over all pairs; weights of a few queries."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import dropout as drop
from torch.nn.functional import scaled_dot_product_attention

from hf_efficient_attn.attention.build_call import (
    LayerPattern,
    QueryOffset,
    check_selected_keys,
    layout_of,
    own_sinks,
    unknown_start,
    with_selected_keys,
)
from hf_efficient_attn.attention.dispatch import attend
from hf_efficient_attn.attention.select import AUTO
from hf_efficient_attn.attention.sharded.layer import attend_shard, refuse_on_shards
from hf_efficient_attn.backends.kernels import plain_rows
from hf_efficient_attn.errors import InputError
from hf_efficient_attn.layout.call import cap
from hf_efficient_attn.layout.dense_mask import allowed_pairs, lse_dtype, read_pairs
from hf_efficient_attn.layout.grouped_reference import unit
from hf_efficient_attn.layout.score_terms import Term
from hf_efficient_attn.layout.selected_keys import ChosenKeys
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.layout.tracing import autocast_off, autocast_states
from hf_efficient_attn.messages import warn_once

# Attention that takes or returns a matrix over all pairs. This takes memory for all pairs.


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    allowed: Tensor | None,
    bias: Tensor | None,
    scale: float,
    dropout: float,
    need_weights: bool,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the output [batch, heads, queries, head_dim] and the weights [batch, heads, queries, keys], or None.

    Args:
        query: [batch, heads, queries, head_dim].
        key, value: [batch, key heads, keys, head_dim].
        allowed: bool that broadcasts to [batch, heads, queries, keys]; None: all pairs. A query without keys gets 0.
        bias: added to the scores, in a shape that broadcasts likewise.
        need_weights: if False, the second result is None.
        sinks, softcap: as for `attention`; the weights of a row with a sink sum to less than 1.
    """
    query, key, value = autocast_states(query, key, value)
    heads_per_key_head = query.shape[1] // key.shape[1]
    if heads_per_key_head > 1:
        key, value = (each.repeat_interleave(heads_per_key_head, 1) for each in (key, value))
    added, has_keys = added_and_keys(allowed, bias, query)
    with autocast_off(query.device.type):
        if not need_weights and sinks is None and softcap is None:
            return _fused(query, key, value, added, has_keys, scale, dropout), None
        out, weights = _explicit(query, key, value, added, has_keys, scale, dropout, sinks, softcap)
    return out, weights if need_weights else None


def added_and_keys(allowed: Tensor | None, bias: Tensor | None, query: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return what is added to the scores, in the dtype of `query` (None: nothing), and which queries have keys (None:
    all).
    """
    if allowed is None:
        return None if bias is None else bias.to(query.dtype), None
    has_keys = allowed.any(-1, keepdim=True)
    # a query without keys gets the softmax of its unmasked scores, which is then set to 0
    added = torch.zeros((), dtype=query.dtype, device=query.device) if bias is None else bias.to(query.dtype)
    return torch.where(allowed | ~has_keys, added, -torch.inf), has_keys


def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    added: Tensor | None,
    has_keys: Tensor | None,
    scale: float,
    dropout: float,
) -> Tensor:
    if query.device.type == "cpu":
        query, key, value = plain_rows(query, key, value)
    out = scaled_dot_product_attention(query, key, value, added, dropout, scale=scale)
    return out if has_keys is None else out.masked_fill(~has_keys, 0)


def _explicit(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    added: Tensor | None,
    has_keys: Tensor | None,
    scale: float,
    dropout: float,
    sinks: Tensor | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    scores = cap(query @ key.transpose(-1, -2) * scale, softcap)
    scores = scores if added is None else scores + added
    if sinks is not None:
        # the sink is one more key, whose weight is left out of the result
        scores = torch.cat([scores, sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)], -1)
    weights = torch.softmax(scores, -1, dtype=lse_dtype(query)).to(query.dtype)
    weights = drop(weights[..., : key.shape[2]], dropout)
    # masked before they are used, so that gradients flow through the returned weights
    weights = weights if has_keys is None else weights.masked_fill(~has_keys, 0)
    return weights @ value, weights


def check_matrix(name: str, matrix: Tensor, shape: tuple[int, int, int, int]) -> None:
    """Refuse a mask or bias that does not broadcast to [batch, heads, queries, keys].

    Raises:
        InputError: the shape does not fit, or the dtype is neither bool nor floating-point.
    """
    fits = matrix.dim() == 4 and all(size in (1, full) for size, full in zip(matrix.shape, shape, strict=True))
    if not fits or matrix.shape[3] != shape[3]:
        raise InputError(
            f"{name} has shape {list(matrix.shape)}; as a matrix it must be [batch or 1, heads or 1, queries or 1, "
            f"keys] = [{shape[0]} or 1, {shape[1]} or 1, {shape[2]} or 1, {shape[3]}]."
        )
    if matrix.dtype != torch.bool and not matrix.is_floating_point():
        raise InputError(
            f"{name} has dtype {matrix.dtype}; a matrix must be bool, True = allowed, or floating-point, added to "
            f"the scores. Use {name}.bool() on a matrix of 0 and 1."
        )


def warn_of_weights() -> None:
    """Warn that attention weights were asked for; compiled models do not warn."""
    if torch.compiler.is_compiling():
        return
    warn_once(
        "output_attentions=True: attention weights are computed for all pairs of tokens, whatever the pattern, in time "
        "and memory that grow with the square of the length. Use this only on short inputs."
    )


# Attention weights of a few queries: what output_attentions=True returns for a long text without n² memory.


AttendLayer = Callable[..., tuple[Tensor, Tensor | None]]

# the innermost block comes last
_selected_rows: list[tuple[int, ...]] = []


@contextmanager
def weights_of_rows(rows: Iterable[int]) -> Iterator[None]:
    """Make models called with output_attentions=True return weights [batch, heads, rows, keys] of these queries only.

    They equal the rows of the weights of all queries. Outputs are computed as without weights, so that time and memory
    are those of a forward pass plus those of the rows. Generation and cross-attention are not supported.
    """
    own = tuple(rows)
    _selected_rows.append(own)
    try:
        yield
    finally:
        _selected_rows.remove(own)


def selected_rows() -> tuple[int, ...] | None:
    """Return the rows that `weights_of_rows` has set, or None outside of it."""
    return _selected_rows[-1] if _selected_rows else None


def rows_or_all(attend: AttendLayer) -> AttendLayer:
    """Return `attend` extended by `weights_of_rows`: the weights of its rows are computed one by one."""

    @wraps(attend)
    def attend_layer(query: Tensor, key: Tensor, *states: Any, need_weights: bool = False, **options: Any) -> Any:
        if not need_weights:
            return attend(query, key, *states, **options)
        rows = selected_rows()
        if rows is None:
            warn_of_weights()
            return attend(query, key, *states, need_weights=True, **options)
        out, _ = attend(query, key, *states, **options)
        weights = [
            attend(query[:, :, row : row + 1], key, *states, need_weights=True, **_of_row(row, query, key, **options))[
                1
            ]
            for row in rows
        ]
        return out, torch.cat([each for each in weights if each is not None], 2)

    return attend_layer


def _of_row(
    row: int,
    query: Tensor,
    key: Tensor,
    query_offset: QueryOffset = None,
    matrix: Tensor | None = None,
    bias: Tensor | None = None,
    terms: Sequence[Term] = (),
    chosen: ChosenKeys | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Return the options of `attend_layer` for a single query."""
    num_queries = query.shape[2]
    position = row + (key.shape[2] - num_queries if query_offset is None else int(query_offset))

    def cut(tensor: Tensor | None) -> Any:
        # a tensor with a single row is shared by all queries
        return tensor if tensor is None or tensor.shape[2] < num_queries else tensor[:, :, row : row + 1]

    return {
        "chosen": None if chosen is None else chosen.of_query(row, position),
        **options,
        "query_offset": position,
        "matrix": cut(matrix),
        "bias": cut(bias),
        "terms": tuple(replace(term, values=cut(term.values)) for term in terms),
    }


# a score that is lower by this has weight 0 in every dtype
NEVER_READ = -1000.0


@rows_or_all
def attend_layer(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layer_spec: LayerPattern,
    tokens: TokenMask,
    scale: float,
    dropout: float = 0.0,
    query_offset: QueryOffset = None,
    matrix: Tensor | None = None,
    bias: Tensor | None = None,
    terms: Sequence[Term] = (),
    sinks: Tensor | None = None,
    softcap: float | None = None,
    need_weights: bool = False,
    backend: str = AUTO,
    chosen: ChosenKeys | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the output [batch, queries, heads, head_dim] and the weights [batch, heads, queries, keys] or None.

    Args:
        query: [batch, heads, queries, head_dim].
        key, value: [batch, key heads, keys, head_dim], the cached ones first.
        tokens: the mask of these keys, or of all keys if a PatternCache holds only the last ones; for a text divided
            among several processes, the mask of the whole text.
        matrix: a mask that a user gave, [batch or 1, heads or 1, queries, keys].
        bias: added to the scores, [batch or 1, heads or 1, queries, keys].
        query_offset, terms, sinks, softcap, chosen: as for `attention`.
        need_weights: compute densely and return the weights, of all queries or of those of `weights_of_rows`.

    Raises:
        InputError: a mask does not belong to these queries and keys.
    """
    if layer_spec.shards is not None:
        refuse_on_shards(matrix is not None, bias is not None, need_weights, chosen is not None)
        options: dict[str, Any] = {"terms": terms, "sinks": sinks, "softcap": softcap, "backend": backend}
        out = attend_shard(query, key, value, layer_spec, layer_spec.shards, tokens, scale, dropout, **options)
        return out.transpose(1, 2).contiguous(), None
    if len(terms) > 0:
        # dense attention in torch would keep several numbers for each pair
        layer_spec = replace(layer_spec, attends_to_all=False)
    tokens = tokens_of_layer(tokens, layer_spec, key)
    if matrix is not None and not layer_spec.is_own:
        check_matrix("attention_mask", matrix, (len(query), query.shape[1], query.shape[2], key.shape[2]))
        if layer_spec.is_causal:
            refuse_future(matrix, query.shape[2], key.shape[2])
        tokens = replace(tokens, key_mask=readable_keys(matrix, len(query)))
    attends_to_all = layer_spec.attends_to_all and tokens.segment_ids is None and chosen is None
    if not (attends_to_all or matrix is not None or bias is not None or need_weights):
        settings = (query_offset, tokens, terms, sinks, softcap, scale, dropout, chosen, backend)
        return attend(query, key, value, layer_spec, *settings)[0].transpose(1, 2).contiguous(), None
    layer_spec, chosen = with_selected_keys(layer_spec, chosen, query, key, tokens, query_offset, backend)
    key = unit(key) if chosen is not None and chosen.unit_keys else key
    sinks = own_sinks(sinks, query, layer_spec.first_head, layer_spec.num_model_heads)
    pairs, added = pairs_and_scores(query, key, layer_spec, tokens, query_offset, matrix, bias, terms, chosen)
    out, weights = dense_attention(query, key, value, pairs, added, scale, dropout, need_weights, sinks, softcap)
    return out.transpose(1, 2).contiguous(), weights


def pairs_and_scores(
    query: Tensor,
    key: Tensor,
    layer_spec: LayerPattern,
    tokens: TokenMask,
    query_offset: QueryOffset,
    matrix: Tensor | None,
    bias: Tensor | None,
    terms: Sequence[Term],
    chosen: ChosenKeys | None,
) -> tuple[Tensor | None, Tensor | None]:
    """Return which pairs are allowed, and what is added to the scores, for attention over all pairs."""
    added = added_scores(matrix, bias, query, key)
    pairs = pairs_of(layer_spec, query_offset, tokens, matrix, query, key)
    if chosen is not None:
        check_keys_of_layer(chosen, query, key, layer_spec)
        pairs = open_pairs(pairs, added)
    # a bias alone needs no layout, and that of cross-attention cannot be traced for dynamic lengths
    if len(terms) > 0 or chosen is not None:
        layout = layout_of(layer_spec, query_offset, query, key)
        where = (layout, tokens, key.shape[1], lse_dtype(query), key.device, unknown_start(query_offset))
        pairs, learned = read_pairs(pairs, terms, chosen, *where)
        added = learned if added is None else added + cast(Tensor, learned)
    return pairs, added


def check_keys_of_layer(chosen: ChosenKeys, query: Tensor, key: Tensor, layer_spec: LayerPattern) -> None:
    """Raise InputError for a choice that does not fit, or whose groups have their own outputs or labels."""
    check_selected_keys(chosen, query, key, layer_spec.is_cross, None)
    if chosen.needs_groups:
        raise InputError(
            "Groups that have their own outputs or labels (join='mean', labels_count='places') have no weights over "
            "all pairs. Leave output_attentions, mask matrices and position biases out."
        )


def open_pairs(pairs: Tensor | None, added: Tensor | None) -> Tensor | None:
    """Return the pairs, bool (None: all), without those that are closed by what is added to their scores."""
    if added is None:
        return pairs
    is_open = added > NEVER_READ
    return is_open if pairs is None else pairs & is_open


def tokens_of_layer(tokens: TokenMask, layer_spec: LayerPattern, key: Tensor) -> TokenMask:
    """Return the token mask of a layer's keys, which may be only the last keys of the mask.

    Raises:
        InputError: the mask was made for other keys.
    """
    if tokens.shape is None:
        return tokens
    check_shape(tokens.shape, layer_spec, key)
    return tokens if tokens.shape[1] == key.shape[2] else tokens.last(key.shape[2])


def check_shape(shape: tuple[int, int], layer_spec: LayerPattern, key: Tensor) -> None:
    """Raise InputError if a mask of this shape, [batch, keys], was not made for the layer's keys."""
    num_rows, width = shape
    num_keys = key.shape[2]
    # a PatternCache holds fewer keys than there are tokens
    if num_rows not in (1, key.shape[0]) or width < num_keys or (width > num_keys and layer_spec.is_own):
        raise InputError(
            f"The padding mask is for {num_rows} x {width} keys, but there are {key.shape[0]} x {num_keys}. "
            "Pass an attention_mask with one column per token, cached tokens first."
        )


def readable_keys(matrix: Tensor, batch_size: int) -> Tensor:
    """Return which keys a matrix allows for at least one query, bool [batch, keys]; the others are padding.

    A pattern's positions count from the first of them, as with a padding mask.
    """
    return _may_read(matrix).any(2).any(1).expand(batch_size, -1)


def _may_read(matrix: Tensor) -> Tensor:
    """Return which pairs a matrix allows, bool in its shape."""
    return matrix if matrix.dtype == torch.bool else matrix > NEVER_READ


def refuse_later_keys(matrix: Tensor, num_queries: int, num_keys: int) -> None:
    """Raise InputError if a matrix allows the last key for no query, since queries are assumed to be the last keys.

    This happens with a cache that has room for later tokens. It is checked only on CPUs, where reading the matrix does
    not wait for a device, and not while compiling.
    """
    if torch.compiler.is_compiling() or matrix.device.type != "cpu" or num_queries == num_keys or matrix.ndim != 4:
        return
    # every layer checks this, so the whole matrix is read only if it allows the last key for no query
    if not bool(_may_read(matrix[..., -1]).any()) and bool(_may_read(matrix).any()):
        raise InputError(
            f"attention_mask is a matrix of {num_keys} keys for {num_queries} new tokens, but none of them attends to "
            "the last key. A pattern needs the new tokens to be the last keys; a static cache has free space after "
            "them. Pass a mask of two dimensions, [batch, tokens], or a DynamicCache."
        )


def refuse_future(matrix: Tensor, num_queries: int, num_keys: int) -> None:
    """Raise InputError if a matrix allows later keys, which a causal pattern would close; checked only on CPUs.

    Rows of padding, whose own token no causal row attends to, may allow anything, and so may a matrix without any mask.
    """
    is_checked = matrix.device.type == "cpu" and matrix.shape[2:] == (num_queries, num_keys)
    if torch.compiler.is_compiling() or not is_checked:
        return
    is_open = _may_read(matrix)
    later = torch.ones(num_queries, num_keys, dtype=torch.bool).triu(num_keys - num_queries + 1)
    has_later = (is_open & later).any(-1)
    # what rows attend to that have no later keys
    own = is_open[..., num_keys - num_queries :] & ~has_later[..., None]
    is_token = own.sum(-2) > own.diagonal(dim1=-2, dim2=-1)
    if bool(((has_later & is_token).any(-1) & ~is_open.all((-1, -2))).any()):
        raise InputError(
            "attention_mask is a matrix that lets tokens attend to later ones (a prefix, an image, both directions), "
            "but the layer follows a causal attention_pattern, which would close these pairs. Close them in the mask, "
            "or use the model without attention_pattern, which honours such a mask."
        )


def pairs_of(
    layer_spec: LayerPattern,
    query_offset: QueryOffset,
    tokens: TokenMask,
    matrix: Tensor | None,
    query: Tensor,
    key: Tensor,
) -> Tensor | None:
    """Return which pairs are allowed, bool that broadcasts to [batch, heads, queries, keys]; None if all are.

    A matrix that the user gave replaces the layer's own attention; a pattern restricts it further.
    """
    allowed = None
    if layer_spec.attends_to_all and tokens.segment_ids is None:
        allowed = None if tokens.key_mask is None else tokens.key_mask[:, None, None]
    elif matrix is None or not layer_spec.is_own:
        layout = layout_of(layer_spec, query_offset, query, key)
        allowed = allowed_pairs(layout, tokens, query.shape[0], query.device, unknown_start(query_offset))
    if matrix is not None and matrix.dtype == torch.bool:
        allowed = matrix if allowed is None else allowed & matrix
    return allowed


def added_scores(matrix: Tensor | None, bias: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Return what is added to the scores: a floating-point mask matrix, a position bias, or both.

    Raises:
        InputError: one of them does not fit these queries and keys.
    """
    shape = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    if matrix is not None:
        check_matrix("attention_mask", matrix, shape)
    if bias is not None:
        check_matrix("position_bias", bias, shape)
    if matrix is None or matrix.dtype == torch.bool:
        return bias
    return matrix if bias is None else bias + matrix
