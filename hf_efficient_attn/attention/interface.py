"""The attention function "efficient" of transformers: any model that uses the attention interface follows a pattern.

A model whose config has an `attention_pattern` computes that; any other computes its own attention, causal or full,
sliding windows, padding and packing included. What a layer follows is decided in `layer_patterns`.
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from hf_efficient_attn.attention.dense_matrix import check_matrix, dense_attention
from hf_efficient_attn.attention.functional import attention
from hf_efficient_attn.attention.layer_patterns import NAME, LayerPattern, layer_pattern
from hf_efficient_attn.attention.notices import warn_of_keyless, warn_of_weights
from hf_efficient_attn.attention.token_table import TokenColumns, efficient_mask, is_table, read_table
from hf_efficient_attn.errors import ConfigurationError, InputError, UnsupportedBackendError
from hf_efficient_attn.layout.dense import allowed_pairs
from hf_efficient_attn.layout.layout import Layout, drawn_layer
from hf_efficient_attn.layout.token_mask import TokenMask

# parts of the score that no pattern has, by the argument that brings them
UNSUPPORTED = {
    "softcap": "caps its scores (softcap)",
    "s_aux": "has attention sinks (s_aux)",
    "sinks": "has attention sinks (sinks)",
    "indices": "chooses its keys by content (indices)",
    "block_indices": "chooses its keys by content (block_indices)",
}
CONTEXT_PARALLEL = "torch.distributed.tensor.experimental._context_parallel._attention"


def register_attention() -> None:
    """Make `attn_implementation="efficient"` known to transformers, attention and masks together; again is harmless."""
    AttentionInterface.register(NAME, efficient_attention_forward)
    AttentionMaskInterface.register(NAME, efficient_mask)


def efficient_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return the output [batch, queries, heads, head_dim] and, with `output_attentions`, the weights; else None.

    Called by the attention modules of transformers, never by users.

    Args:
        query: [batch, heads, queries, head_dim].
        key, value: [batch, key heads, keys, head_dim], the cached ones first.
        attention_mask: a token table (`token_table`), a matrix [batch or 1, heads or 1, queries, keys] that a user
            gave, or None.
        kwargs: `is_causal`, `sliding_window`, `position_bias` and `output_attentions` count; others are ignored.

    Raises:
        ConfigurationError: an `attention_pattern` that the model, or cached decoding, cannot have.
        InputError: a mask that does not belong to these queries and keys.
        UnsupportedBackendError: the model needs what the engine cannot compute.
    """
    refuse_unsupported(module, query, kwargs)
    followed = layer_pattern(module, kwargs)
    check_lengths(module, followed, query, key)
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    matrix = None if attention_mask is None or is_table(attention_mask) else attention_mask
    columns = TokenColumns()
    if matrix is None:
        columns = read_columns(attention_mask, followed, query, key)
    bias = kwargs.get("position_bias")
    need_weights = bool(kwargs.get("output_attentions"))
    reads_all = followed.reads_all and columns.segment_ids is None
    if reads_all or matrix is not None or bias is not None or need_weights:
        if need_weights:
            warn_of_weights()
        added = added_scores(matrix, bias, query, key)
        pairs = pairs_of(followed, columns, matrix, query, key)
        out, weights = dense_attention(query, key, value, pairs, added, scale, dropout, need_weights)
        return out.transpose(1, 2).contiguous(), weights
    attended: Any = attention(
        query,
        key,
        value,
        followed.pattern,
        scale=scale,
        key_mask=columns.key_mask,
        segment_ids=columns.segment_ids,
        dropout=dropout,
        query_offset=columns.query_offset,
        layer=followed.layer,
    )
    return attended.transpose(1, 2).contiguous(), None


def refuse_unsupported(module: nn.Module, query: Tensor, options: dict[str, Any]) -> None:
    """Raise UnsupportedBackendError for what would be computed wrongly: caps, sinks, paged and sharded sequences."""
    for option, what in UNSUPPORTED.items():
        if options.get(option) is not None:
            raise UnsupportedBackendError(
                f'{type(module).__name__} {what}, which attn_implementation="{NAME}" cannot compute. Load the model '
                'with attn_implementation="eager" and without attention_pattern.'
            )
    if options.get("cache") is not None:
        raise UnsupportedBackendError(
            f'attn_implementation="{NAME}" cannot read a paged cache (generate_batch). Use generate.'
        )
    if torch.compiler.is_compiling():
        return
    context_parallel = sys.modules.get(CONTEXT_PARALLEL)
    if hasattr(query, "placements") or (context_parallel and getattr(context_parallel, "_replaced_functions", None)):
        raise UnsupportedBackendError(
            "Context parallelism cuts the sequence into shards and would drop the pattern. Train with data or fully "
            "sharded data parallelism instead (DDP, FSDP)."
        )


def check_lengths(module: nn.Module, followed: LayerPattern, query: Tensor, key: Tensor) -> None:
    """Refuse a pattern of the config where the queries are not all of the keys and the pattern cannot have that.

    Raises:
        ConfigurationError: a pattern that is another one at every length, in cached decoding.
        UnsupportedBackendError: keys that belong to no query, without causal attention.
    """
    if followed.is_own:
        return
    pattern, num_queries, num_keys = followed.pattern, query.shape[2], key.shape[2]
    if num_queries == num_keys:
        if not torch.compiler.is_compiling():
            warn_of_keyless(pattern, query.shape[1], num_keys, drawn_layer(pattern, followed.layer))
    elif pattern.depends_on_length:
        raise ConfigurationError(
            f"A pattern of kind {pattern.kind!r} is drawn anew for every length, so decoding with a cache would not "
            "equal the computation without one. Generate with use_cache=False."
        )
    elif not followed.is_causal:
        raise UnsupportedBackendError(
            f"{type(module).__name__} has {num_queries} queries and {num_keys} keys, but no causal attention: "
            "attention_pattern is not defined for such calls (prefix tuning of an encoder, cross-attention of an "
            "unknown kind). Remove attention_pattern with sparsify(model, None)."
        )


def read_columns(table: Tensor | None, followed: LayerPattern, query: Tensor, key: Tensor) -> TokenColumns:
    """Return what the token table says about the keys.

    Raises:
        InputError: the table was made for other keys.
    """
    num_keys = key.shape[2]
    if table is not None:
        width = table.shape[3]
        # a pattern cache holds fewer keys than there are tokens
        if table.shape[0] not in (1, len(key)) or width < num_keys or (width > num_keys and followed.is_own):
            raise InputError(
                f"The padding mask is for {table.shape[0]} x {width} keys, but there are {len(key)} x {num_keys}. Pass "
                "an attention_mask with one column a token, cached tokens first."
            )
    return read_table(table, len(query), query.shape[2], num_keys)


def pairs_of(
    followed: LayerPattern, columns: TokenColumns, matrix: Tensor | None, query: Tensor, key: Tensor
) -> Tensor | None:
    """Return which query may read which key, bool that broadcasts to [batch, heads, queries, keys]; None: all pairs.

    A matrix that the user gave takes the place of the layer's own attention, and is cut down by a pattern.
    """
    num_queries, num_keys = query.shape[2], key.shape[2]
    allowed = None
    if followed.reads_all and columns.segment_ids is None:
        allowed = None if columns.key_mask is None else columns.key_mask[:, None, None]
    elif matrix is None or not followed.is_own:
        offset = num_keys - num_queries if columns.query_offset is None else int(columns.query_offset)
        layout = Layout(followed.pattern, query.shape[1], num_queries, num_keys, offset, followed.layer)
        tokens = TokenMask(columns.key_mask, columns.segment_ids)
        allowed = allowed_pairs(layout, tokens, len(query), query.device)
    if matrix is not None and matrix.dtype == torch.bool:
        allowed = matrix if allowed is None else allowed & matrix
    return allowed


def added_scores(matrix: Tensor | None, bias: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Return what is added to the scores: a floating-point mask matrix, a position bias, or both.

    Raises:
        InputError: one of them does not belong to these queries and keys.
    """
    shape = (len(query), query.shape[1], query.shape[2], key.shape[2])
    if matrix is not None:
        check_matrix("attention_mask", matrix, shape)
    if bias is not None:
        check_matrix("position_bias", bias, shape)
    if matrix is None or matrix.dtype == torch.bool:
        return bias
    return matrix if bias is None else bias + matrix
