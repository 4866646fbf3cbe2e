"""The attention function and the mask function "efficient" for transformers, with which any model follows a pattern.

A model whose config has an `attention_pattern` follows it; any other computes its own attention, causal or full,
including sliding windows, padding and packing. `layer_patterns` decides what a layer follows.
"""

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_efficient_attn.attention.build_call import LayerPattern, QueryOffset
from hf_efficient_attn.attention.layer import attend_layer, check_shape, refuse_later_keys
from hf_efficient_attn.attention.sharded.shards import shards_of
from hf_efficient_attn.errors import UnsupportedBackendError
from hf_efficient_attn.integration.guard import guard_models
from hf_efficient_attn.integration.indexer import indexed_selected_keys, with_earlier_keys
from hf_efficient_attn.integration.layer_patterns import NAME, layer_pattern
from hf_efficient_attn.integration.masks import read_table, requested_table
from hf_efficient_attn.integration.model_info import head_range
from hf_efficient_attn.integration.names import is_table
from hf_efficient_attn.integration.packing import with_marked_tokens, with_parsed_documents
from hf_efficient_attn.integration.saving import name_architectures, write_implementations
from hf_efficient_attn.integration.selected_keys import cached_selected_keys, given_selected_keys
from hf_efficient_attn.integration.streaming_cache import in_cache_positions
from hf_efficient_attn.integration.trial import TRIALS, refuse_mask_user
from hf_efficient_attn.integration.unsupported import compare_processes, refuse_unsupported
from hf_efficient_attn.layout.token_mask import NO_MASK, TokenMask


def register_attention() -> None:
    """Register `attn_implementation="efficient"` in transformers: attention, masks, saving of configs, and checks.

    May be called repeatedly. In a copy of these sources (`hub`) it does nothing if the package or another copy has
    already registered.
    """
    if not __name__.startswith("hf_efficient_attn.") and NAME in ALL_ATTENTION_FUNCTIONS.valid_keys():
        return
    AttentionInterface.register(NAME, efficient_attention_forward)
    AttentionMaskInterface.register(NAME, efficient_mask)
    for name, attend, mask in TRIALS:
        AttentionInterface.register(name, attend)
        AttentionMaskInterface.register(name, mask)
    write_implementations()
    name_architectures()
    guard_models()


@functools.wraps(requested_table)
def efficient_mask(*args: Any, **kwargs: Any) -> Tensor:
    """Return the token table of a mask that a model requests (`masks.py`), after a trial of that kind of model.

    transformers calls it once per forward pass and kind of mask, with the arguments of its `sdpa_mask`.

    Raises:
        UnsupportedBackendError: the model uses masks outside the attention interface.
    """
    config = kwargs.get("config")
    # a trial must not become part of a traced graph
    if config is not None and not torch.compiler.is_compiling() and not torch.jit.is_tracing():
        refuse_mask_user(config)
    return requested_table(*args, **kwargs)


def efficient_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return the output [batch, queries, heads, head_dim] and, with `output_attentions`, the weights, otherwise None.

    The attention modules of transformers call this function.

    Args:
        query: [batch, heads, queries, head_dim].
        key, value: [batch, key heads, keys, head_dim], the cached ones first.
        attention_mask: a token table (`masks.py`), a matrix [batch or 1, heads or 1, queries, keys] from the user, or
            None.
        kwargs: `is_causal`, `sliding_window`, `position_bias`, `position_terms` (of our families), `s_aux` (sinks),
            `softcap`, `output_attentions`, chosen keys (`given_selected_keys`), and the arguments about packed
            documents and global tokens (`packing.py`) are used; others are ignored.

    Raises:
        ConfigurationError: an `attention_pattern` that does not fit the model or cached decoding, or that differs from
            that of other processes.
        InputError: a mask that does not fit these queries and keys.
        UnsupportedBackendError: the model needs something that the engine cannot compute, or it is unknown which heads
            of the model this process computes.
    """
    refuse_unsupported(module, query, kwargs)
    layer_spec = layer_pattern(module, kwargs, attention_mask)
    first_head, num_model_heads = head_range(module, layer_spec.pattern, query.shape[1])
    shards = shards_of(module)
    if num_model_heads is not None or shards is not None:
        layer_spec = replace(layer_spec, first_head=first_head, num_model_heads=num_model_heads, shards=shards)
    check_lengths(module, layer_spec, query.shape[2], key.shape[2])
    if not getattr(module, "layer_idx", None):
        compare_processes(module)
    is_matrix = attention_mask is not None and not is_table(attention_mask)
    tokens, query_offset = parsed_masks(module, attention_mask, kwargs, layer_spec, query, key)
    layer_spec, tokens = with_marked_tokens(module, tokens, query_offset, kwargs, layer_spec, query, key)
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    value_dim = value.shape[3]
    layer_spec, key, value, (tokens, query_offset), kwargs = with_earlier_keys(
        module, layer_spec, key, value, (tokens, query_offset), kwargs
    )
    layer_spec, chosen, matrix = given_selected_keys(
        module, layer_spec, kwargs, attention_mask if is_matrix else None, tokens
    )
    states = (query, key, scale)
    chosen = indexed_selected_keys(module, kwargs, layer_spec, tokens, query_offset, matrix, *states, chosen)
    if chosen is None and matrix is None:
        layer_spec, chosen = cached_selected_keys(module, layer_spec, query, key, tokens, query_offset)
    query, key, value = in_cache_positions(module, query, key, value)
    out, weights = attend_layer(
        query,
        key,
        value,
        layer_spec,
        tokens,
        scale,
        dropout=dropout,
        query_offset=query_offset,
        matrix=matrix,
        bias=kwargs.get("position_bias"),
        terms=kwargs.get("position_terms", ()),
        sinks=kwargs.get("s_aux"),
        softcap=kwargs.get("softcap"),
        need_weights=bool(kwargs.get("output_attentions")),
        chosen=chosen,
    )
    return out if out.shape[3] == value_dim else out[..., :value_dim].contiguous(), weights


def parsed_masks(
    module: nn.Module,
    attention_mask: Tensor | None,
    options: dict[str, Any],
    layer_spec: LayerPattern,
    query: Tensor,
    key: Tensor,
) -> tuple[TokenMask, QueryOffset]:
    """Return the token mask of a call, by its mask and arguments, and the position of its first query."""
    is_read = attention_mask is not None and is_table(attention_mask)
    if attention_mask is not None and not is_read and not layer_spec.is_own:
        refuse_later_keys(attention_mask, query.shape[2], key.shape[2])
    tokens, query_offset = parsed_tokens(attention_mask if is_read else None, layer_spec, query, key)
    if layer_spec.shards is None:
        # with shards, the mask of the whole text already has the documents
        tokens = with_parsed_documents(module, attention_mask, tokens, query_offset, options, layer_spec, query, key)
    return tokens, query_offset


def parsed_tokens(
    table: Tensor | None, layer_spec: LayerPattern, query: Tensor, key: Tensor
) -> tuple[TokenMask, QueryOffset]:
    """Return the token mask of a layer's keys, by a token table, and the position of the first query.

    Raises:
        InputError: the table was made for other keys.
    """
    if table is None:
        return NO_MASK, None
    if layer_spec.shards is not None:
        return read_table(table, key.shape[0], query.shape[2], table.shape[3])
    check_shape((table.shape[0], table.shape[3]), layer_spec, key)
    return read_table(table, key.shape[0], query.shape[2], key.shape[2])


def check_lengths(module: nn.Module, layer_spec: LayerPattern, num_queries: int, num_keys: int) -> None:
    """Raise UnsupportedBackendError if queries and keys differ in number in a bidirectional layer with a pattern."""
    if not layer_spec.is_own and num_queries != num_keys and not layer_spec.is_causal:
        raise UnsupportedBackendError(
            f"{type(module).__name__} has {num_queries} queries and {num_keys} keys in bidirectional attention, for "
            "which attention_pattern is not defined (prefix tuning of an encoder, cross-attention of an unknown "
            "kind). Remove attention_pattern with sparsify(model, None)."
        )
