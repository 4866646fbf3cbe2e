"""The attention of one layer, given the pattern that it follows and the masks of its model."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from hf_efficient_attn.attention.call import layout_of
from hf_efficient_attn.attention.checks import check_chosen, own_sinks
from hf_efficient_attn.attention.content_choice import with_choice
from hf_efficient_attn.attention.dense_matrix import check_matrix, dense_attention
from hf_efficient_attn.attention.dispatch import attend
from hf_efficient_attn.attention.key_tokens import QueryOffset, unknown_start
from hf_efficient_attn.attention.layer_patterns import LayerPattern
from hf_efficient_attn.attention.select import AUTO
from hf_efficient_attn.attention.sharded.layer import attend_shard, refuse_on_shards
from hf_efficient_attn.attention.weight_rows import rows_or_all
from hf_efficient_attn.errors import InputError
from hf_efficient_attn.layout.dense_mask import allowed_pairs, lse_dtype, read_pairs
from hf_efficient_attn.layout.grouped_reference import unit
from hf_efficient_attn.layout.score_terms import Term
from hf_efficient_attn.layout.selected_keys import ChosenKeys
from hf_efficient_attn.layout.token_mask import TokenMask

# a score that is lower by this has weight 0 in every dtype
NEVER_READ = -1000.0


@rows_or_all
def attend_layer(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    followed: LayerPattern,
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
        tokens: the mask of these keys, or of all keys, of which a PatternCache holds the last ones; for a text over
            several processes, that of the whole text.
        matrix: a mask that a user gave, [batch or 1, heads or 1, queries, keys].
        bias: added to the scores, [batch or 1, heads or 1, queries, keys].
        query_offset, terms, sinks, softcap, chosen: as for `attention`.
        need_weights: compute densely and return the weights, of all queries or of those of `weights_of_rows`.

    Raises:
        InputError: a mask that does not belong to these queries and keys.
    """
    if followed.shards is not None:
        refuse_on_shards(matrix is not None, bias is not None, need_weights, chosen is not None)
        options: dict[str, Any] = {"terms": terms, "sinks": sinks, "softcap": softcap, "backend": backend}
        out = attend_shard(query, key, value, followed, followed.shards, tokens, scale, dropout, **options)
        return out.transpose(1, 2).contiguous(), None
    if len(terms) > 0:
        # torch alone would keep several numbers for each pair
        followed = replace(followed, reads_all=False)
    tokens = tokens_of_layer(tokens, followed, key)
    if matrix is not None and not followed.is_own:
        check_matrix("attention_mask", matrix, (len(query), query.shape[1], query.shape[2], key.shape[2]))
        tokens = replace(tokens, key_mask=readable_keys(matrix, len(query)))
    reads_all = followed.reads_all and tokens.segment_ids is None and chosen is None
    if not (reads_all or matrix is not None or bias is not None or need_weights):
        settings = (query_offset, tokens, terms, sinks, softcap, scale, dropout, chosen, backend)
        return attend(query, key, value, followed, *settings)[0].transpose(1, 2).contiguous(), None
    followed, chosen = with_choice(followed, chosen, query, key, tokens, query_offset, backend)
    key = unit(key) if chosen is not None and chosen.unit_keys else key
    sinks = own_sinks(sinks, query, followed.first_head, followed.num_model_heads)
    pairs, added = pairs_and_scores(query, key, followed, tokens, query_offset, matrix, bias, terms, chosen)
    out, weights = dense_attention(query, key, value, pairs, added, scale, dropout, need_weights, sinks, softcap)
    return out.transpose(1, 2).contiguous(), weights


def pairs_and_scores(
    query: Tensor,
    key: Tensor,
    followed: LayerPattern,
    tokens: TokenMask,
    query_offset: QueryOffset,
    matrix: Tensor | None,
    bias: Tensor | None,
    terms: Sequence[Term],
    chosen: ChosenKeys | None,
) -> tuple[Tensor | None, Tensor | None]:
    """Return which query may read which key, and what is added to the scores, for attention over all pairs."""
    added = added_scores(matrix, bias, query, key)
    pairs = pairs_of(followed, query_offset, tokens, matrix, query, key)
    if chosen is not None:
        check_choice(chosen, query, key, followed)
        pairs = open_pairs(pairs, added)
    # the layout of cross-attention with a bias alone cannot be traced at any two lengths
    if len(terms) > 0 or chosen is not None:
        layout = layout_of(followed, query_offset, query, key)
        where = (layout, tokens, key.shape[1], lse_dtype(query), key.device, unknown_start(query_offset))
        pairs, learned = read_pairs(pairs, terms, chosen, *where)
        added = learned if added is None else added + cast(Tensor, learned)
    return pairs, added


def check_choice(chosen: ChosenKeys, query: Tensor, key: Tensor, followed: LayerPattern) -> None:
    """Raise InputError for a choice that does not fit, or has an output for each of its groups."""
    check_chosen(chosen, query, key, followed.is_cross, None)
    if chosen.needs_groups:
        raise InputError(
            "Groups with outputs or labels of their own (join='mean', labels_count='places') are computed without "
            "weights over all pairs: leave output_attentions, mask matrices and position biases out."
        )


def open_pairs(pairs: Tensor | None, added: Tensor | None) -> Tensor | None:
    """Return the pairs, bool (None: all), without those that numbers which are added to the scores close."""
    if added is None:
        return pairs
    is_open = added > NEVER_READ
    return is_open if pairs is None else pairs & is_open


def tokens_of_layer(tokens: TokenMask, followed: LayerPattern, key: Tensor) -> TokenMask:
    """Return the token mask of a layer's keys, which may be only the last keys of the mask.

    Raises:
        InputError: the mask was made for other keys.
    """
    if tokens.shape is None:
        return tokens
    check_shape(tokens.shape, followed, key)
    return tokens if tokens.shape[1] == key.shape[2] else tokens.last(key.shape[2])


def check_shape(shape: tuple[int, int], followed: LayerPattern, key: Tensor) -> None:
    """Raise InputError if a mask of this shape, [batch, keys], was made for other keys than a layer's."""
    num_rows, width = shape
    num_keys = key.shape[2]
    # a PatternCache holds fewer keys than there are tokens
    if num_rows not in (1, key.shape[0]) or width < num_keys or (width > num_keys and followed.is_own):
        raise InputError(
            f"The padding mask is for {num_rows} x {width} keys, but there are {key.shape[0]} x {num_keys}. "
            "Pass an attention_mask with one column per token, cached tokens first."
        )


def readable_keys(matrix: Tensor, batch_size: int) -> Tensor:
    """Return which keys some query may read by a matrix, bool [batch, keys]; the others are padding.

    A pattern's positions count from the first of them, as with a padding mask.
    """
    return _may_read(matrix).any(2).any(1).expand(batch_size, -1)


def _may_read(matrix: Tensor) -> Tensor:
    """Return which pairs a matrix opens, bool of its shape."""
    return matrix if matrix.dtype == torch.bool else matrix > NEVER_READ


def refuse_later_keys(matrix: Tensor, num_queries: int, num_keys: int) -> None:
    """Raise InputError for a matrix under which no query reads the last key, where queries are taken for the last keys.

    So it is in a cache that has room for later tokens. It is asked on CPUs alone, where reading waits for nothing, and
    not while compiling.
    """
    if torch.compiler.is_compiling() or matrix.device.type != "cpu" or num_queries == num_keys or matrix.ndim != 4:
        return
    # every layer asks: the whole matrix is read where it is refused, and where it opens nothing
    if not bool(_may_read(matrix[..., -1]).any()) and bool(_may_read(matrix).any()):
        raise InputError(
            f"attention_mask is a matrix of {num_keys} keys for {num_queries} new tokens, of which none reads the last "
            "key. A pattern takes the new tokens for the last keys, and a static cache has room behind them. Pass a "
            "mask of two dimensions, [batch, tokens], or a DynamicCache."
        )


def pairs_of(
    followed: LayerPattern,
    query_offset: QueryOffset,
    tokens: TokenMask,
    matrix: Tensor | None,
    query: Tensor,
    key: Tensor,
) -> Tensor | None:
    """Return which query may read which key, bool that broadcasts to [batch, heads, queries, keys]; None: all pairs.

    A matrix that the user gave replaces the layer's own attention; a pattern restricts it further.
    """
    allowed = None
    if followed.reads_all and tokens.segment_ids is None:
        allowed = None if tokens.key_mask is None else tokens.key_mask[:, None, None]
    elif matrix is None or not followed.is_own:
        layout = layout_of(followed, query_offset, query, key)
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
