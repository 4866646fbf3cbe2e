"""What only the keyword arguments of an attention call say, and not its mask: packed documents, global tokens."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.utils.import_utils import is_tracing

from hf_efficient_attn.attention.forward_context import (
    given_positions,
    is_computed_again,
    note_marked,
    was_called_without,
)
from hf_efficient_attn.attention.input_checks import MARKED, check_marked_shape
from hf_efficient_attn.attention.key_tokens import QueryOffset
from hf_efficient_attn.attention.layer_patterns import NAME, LayerPattern
from hf_efficient_attn.attention.model_parts import DECODER, PART
from hf_efficient_attn.attention.notices import warn_of_unseen_documents
from hf_efficient_attn.attention.overridden import is_overridden, warn_of_parts
from hf_efficient_attn.attention.packing import position_starts, said_starts
from hf_efficient_attn.attention.table_form import is_table
from hf_efficient_attn.errors import InputError
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.layout.tracing import run_untraced
from hf_efficient_attn.layout.transfer import bring, derived, on_host
from hf_efficient_attn.messages import shown


def with_said_documents(
    module: nn.Module,
    attention_mask: Tensor | None,
    tokens: TokenMask,
    query_offset: QueryOffset,
    options: Mapping[str, Any],
    followed: LayerPattern,
    query: Tensor,
    key: Tensor,
) -> TokenMask:
    """Return the token mask with the documents of `cu_seq_lens_q` and `seq_idx`; without a mask, of `position_ids`.

    A mask is made for every call of a model, so it is only missing where another library has dropped it.

    Args:
        attention_mask: the mask that the layer got.
        tokens, query_offset: what it says about the keys, if it is a token table.

    Raises:
        InputError: documents of other tokens than these, or documents that the positions of a model with absolute
            positions do not show.
    """
    starts = said_starts(options, key.shape[0], query.shape[2])
    if starts is None:
        if attention_mask is not None:
            _warn_of_restarts(module, attention_mask, tokens, query_offset, options, query, key)
            return tokens
        positions = _positions(options, query)
        # a layer that reads everything may not have asked for a mask, and its positions may count something else
        if positions is None or query.shape[2] != key.shape[2] or (followed.reads_all and not is_overridden(NAME)):
            return tokens
        starts = position_starts(positions)
        if not is_tracing(starts):
            if not on_host(starts).any():
                return tokens
            warn_of_parts(positions, NAME)
    elif query.shape[2] != key.shape[2] or (attention_mask is not None and not is_table(attention_mask)):
        raise InputError(
            f"cu_seq_lens_q or seq_idx say where documents begin, but there are {query.shape[2]} queries and "
            f"{key.shape[2]} keys, or a mask that is a matrix. Pass them without a cache and without such a mask."
        )
    elif not has_relative_positions(module, options):
        _require_restarts(module, starts, options, query)
    return join_documents(tokens, starts)


def join_documents(tokens: TokenMask, starts: Tensor) -> TokenMask:
    """Return a token mask in which further documents begin at `starts`, bool [batch, keys]."""
    segments = tokens.segment_ids
    if segments is not None:
        starts = starts | pad(segments[:, 1:] != segments[:, :-1], (1, 0))
    return replace(tokens, segment_ids=1 + starts.cumsum(1))


def with_marked_tokens(
    module: nn.Module,
    tokens: TokenMask,
    query_offset: QueryOffset,
    options: Mapping[str, Any],
    followed: LayerPattern,
    query: Tensor,
    key: Tensor,
) -> tuple[LayerPattern, TokenMask]:
    """Return what a layer follows and its token mask, with the global tokens of the call's `global_attention_mask`.

    They belong to the pattern of the config, as `GlobalTokens` would: a layer that keeps its own attention does not
    take them, and in an encoder-decoder they are tokens of the encoder, as in LED.

    Raises:
        InputError: a mask of another shape, a text that processes share, or a pattern that chooses by content.
    """
    marked = options.get(MARKED)
    if marked is None or followed.is_own or getattr(module, PART, None) == DECODER:
        return followed, tokens
    run_untraced(note_marked, module)
    if followed.shards is not None or followed.pattern.chooses_by_content:
        what = "processes share the texts" if followed.shards is not None else f"they follow {shown(followed.pattern)}"
        raise InputError(
            f"{MARKED} is not taken by layers of a sparsified model where {what}. Leave it out, and give the positions "
            "in a pattern by position, band(...) | global(...)."
        )
    num_keys = key.shape[2]
    known: Any = num_keys if query_offset is None else query_offset + query.shape[2]
    if isinstance(known, Tensor):
        # a compiler does not know how much of a static cache is written
        known = min(marked.shape[-1], num_keys)
    check_marked_shape(marked, key.shape[0], known)
    is_global = derived(lambda marked: pad(marked.bool(), (0, num_keys - marked.shape[1])), marked)
    return followed.with_globals, replace(tokens, global_mask=is_global)


def has_relative_positions(module: nn.Module, options: Mapping[str, Any]) -> bool:
    """Return whether a layer is known to have relative positions (rotary or a bias), independent of the start."""
    config: Any = module.config
    if options.get("position_bias") is not None or getattr(config, "rope_parameters", None):
        return True
    # some configs have the field although it says nothing about their positions
    is_absolute = getattr(config, "position_embedding_type", None) == "absolute"
    return getattr(config, "rope_theta", None) is not None and not is_absolute


def _require_restarts(module: nn.Module, starts: Tensor, options: Mapping[str, Any], query: Tensor) -> None:
    """Raise InputError unless the positions, which the model has added, restart where documents begin."""
    # recomputation needs no check, as the forward pass was checked; a compiled graph checks both
    if not torch.compiler.is_compiling() and is_computed_again():
        return
    positions = _positions(options, query, given_positions(module.config))
    problem = (
        "cu_seq_lens_q or seq_idx begin documents, but the position_ids that reach this "
        f"{type(module).__name__} {'do not restart there' if positions is not None else 'are unknown'}, and nothing "
        "says that its positions are relative. Pass position_ids that restart with every document. A model that does "
        "not pass them on to its layers can pack by these position_ids alone, with use_cache=False and without "
        "attention_mask, cu_seq_lens and seq_idx."
    )
    if positions is None:
        raise InputError(problem)
    restarts = ~(starts & ~position_starts(positions)).any()
    if torch.compiler.is_compiling():
        torch._assert_async(restarts, problem)
    elif not is_tracing(restarts) and not restarts:
        raise InputError(problem)


def _positions(options: Mapping[str, Any], query: Tensor, given: Tensor | None = None) -> Tensor | None:
    """Return the positions of the queries, [batch, queries]; None: the call does not have one per query.

    given: those that the model was called with, which may not reach its layers.
    """
    positions = options.get("position_ids")
    positions = given if positions is None else positions
    if not isinstance(positions, Tensor) or positions.ndim != 2 or positions.shape[1] != query.shape[2]:
        return None
    if len(positions) not in (1, len(query)):
        return None
    return derived(lambda positions: positions.expand(len(query), -1), positions)


def _warn_of_restarts(
    module: nn.Module,
    mask: Tensor,
    tokens: TokenMask,
    query_offset: QueryOffset,
    options: Mapping[str, Any],
    query: Tensor,
    key: Tensor,
) -> None:
    """Warn, in a model's first layer, of documents that its mask does not separate; padding is no document."""
    num_queries = query.shape[2]
    # checked before any length, which would become part of the graph; what takes longest, last
    if torch.compiler.is_compiling() or getattr(module, "layer_idx", None) or is_tracing(query) or num_queries == 1:
        return
    # positions that the model counts itself start no document, and a layer that is computed again has been looked at
    if was_called_without(module.config) or is_computed_again():
        return
    positions = _positions(options, query, given_positions(module.config))
    if positions is None or not is_table(mask) or tokens.segment_ids is not None:
        return
    bring(positions, tokens.key_mask)
    is_token = None if tokens.key_mask is None else on_host(tokens.key_mask)
    if is_token is not None:
        first = key.shape[2] - num_queries if query_offset is None else int(query_offset)
        is_token = is_token[:, first : first + num_queries]
    if bool(position_starts(on_host(positions), is_token).any()):
        warn_of_unseen_documents(module.config)
