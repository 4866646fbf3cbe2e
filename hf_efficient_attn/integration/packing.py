"""The starts of packed documents, by the positions of their tokens or by a call's keyword arguments.

`DataCollatorWithFlattening` gives `cu_seq_lens_q` and `cu_seq_lens_k` (0, followed by the end of each document) and
`seq_idx` (the number of each token's document).
"""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils.weak import WeakIdKeyDictionary
from transformers.utils.import_utils import is_tracing

from hf_efficient_attn.attention.build_call import LayerPattern, QueryOffset
from hf_efficient_attn.errors import InputError
from hf_efficient_attn.integration.forward_context import (
    CACHE_NAME,
    given_positions,
    is_computed_again,
    is_paged,
    note_marked,
    was_called_without,
)
from hf_efficient_attn.integration.layer_patterns import DECODER, NAME, PART
from hf_efficient_attn.integration.model_info import is_overridden, warn_of_parts
from hf_efficient_attn.integration.names import is_table
from hf_efficient_attn.integration.unsupported import MARKED, check_marked_shape
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.layout.tracing import run_untraced
from hf_efficient_attn.layout.transfer import derived, on_host, prefetch_to_host
from hf_efficient_attn.messages import shown

ENDS = ("cu_seq_lens_q", "cu_seq_lens_k")
NUMBERS = "seq_idx"


def position_starts(position_ids: Tensor, is_token: Tensor | None = None) -> Tensor:
    """Return where documents begin, bool: at tokens whose position does not follow that of the previous token.

    With a mask, the position must follow neither that of the previous unmasked token nor that of the previous column.
    The first token of a row and masked tokens are not counted as starts. Shapes: [B, T] each.

    >>> is_token = torch.tensor([[0, 0, 1, 1, 1, 1]]).bool()
    >>> position_starts(torch.tensor([[1, 1, 0, 1, 0, 1]]), is_token).int().tolist()
    [[0, 0, 0, 0, 1, 0]]
    """
    breaks = pad(position_ids[:, 1:] != position_ids[:, :-1] + 1, (1, 0))
    if is_token is None:
        return breaks
    index = torch.arange(position_ids.shape[1], device=position_ids.device).expand_as(position_ids)
    last = torch.where(is_token, index, -1).cummax(1).values
    before = pad(last, (1, -1), value=-1)
    follows = position_ids == position_ids.gather(1, before.clamp(min=0)) + 1
    return breaks & is_token & (before >= 0) & ~follows


def parsed_starts(options: Mapping[str, Any], batch_size: int, tokens: int) -> Tensor | None:
    """Return where documents begin by the keyword arguments of a call, bool [B, T]; None: they do not say.

    Raises:
        InputError: the arguments do not fit these tokens.
    """
    if is_paged(options.get(CACHE_NAME)):
        # here the arguments describe the texts of a paged cache, for its kernels
        return None
    starts = None
    for name in (NUMBERS, *ENDS):
        if not isinstance(options.get(name), Tensor | None):
            raise InputError(f"{name} is a {type(options[name]).__name__}; it must be a tensor of integers.")
    numbers = options.get(NUMBERS)
    if numbers is not None:
        if numbers.ndim != 2 or numbers.shape[1] != tokens or len(numbers) not in (1, batch_size):
            raise InputError(f"seq_idx has shape {list(numbers.shape)}; it must be [batch, tokens] = [.., {tokens}].")
        starts = pad(numbers[:, 1:] != numbers[:, :-1], (1, 0)).expand(batch_size, -1)
    ends = [options[name] for name in ENDS if options.get(name) is not None]
    if not ends:
        return starts
    _check_ends(ends, batch_size, tokens)
    begins = torch.zeros(1, tokens + 1, dtype=torch.bool, device=ends[0].device)
    begins[0, ends[0].long()] = True
    begins = pad(begins[:, 1:tokens], (1, 0))
    return begins if starts is None else starts | begins


def _check_ends(ends: list[Tensor], batch_size: int, tokens: int) -> None:
    if batch_size != 1:
        raise InputError(
            f"cu_seq_lens_q describes the documents of one flattened row, but the batch has {batch_size} rows. Pass "
            "position_ids that restart with every document."
        )
    if is_tracing(ends[0]):
        return
    prefetch_to_host(*ends)
    first, last = on_host(ends[0]), on_host(ends[-1])
    is_whole = first.ndim == 1 and len(first) > 1 and first[0] == 0 and first[-1] == tokens
    if not is_whole or bool((first.diff() < 0).any()) or not torch.equal(first, last.to(first)):
        raise InputError(
            f"cu_seq_lens_q={_shortened(first)} and cu_seq_lens_k={_shortened(last)} must be equal, begin with 0, "
            f"ascend, and end with the number of tokens, {tokens}: they are the ends of the documents."
        )


def _shortened(values: Tensor) -> str:
    shown = values.flatten()[:6].tolist()
    return f"{shown}{' ...' if values.numel() > 6 else ''}"


def parsed_positions(
    position_ids: Tensor | None, options: Mapping[str, Any], batch_size: int, tokens: int, past_tokens: int | Tensor
) -> Tensor | None:
    """Return positions that restart with every document, if a call's keyword arguments say where documents begin.

    Otherwise return `position_ids` unchanged. Shape: [B or 1, T].

    Raises:
        InputError: the documents of cached tokens are unknown, or `position_ids` contradict the arguments.
    """
    starts = parsed_starts(options, batch_size, tokens)
    if starts is None:
        return position_ids
    if not isinstance(past_tokens, int) or past_tokens:
        raise InputError(
            "cu_seq_lens_q and seq_idx say where documents begin among the new tokens, but not among the cached "
            "tokens. Leave them out while generating, or pass the whole text without a cache."
        )
    if position_ids is None:
        index = torch.arange(tokens, device=starts.device)[None]
        return index - torch.where(starts, index, 0).cummax(1).values
    if not is_tracing(starts) and bool((starts & ~position_starts(position_ids)).any()):
        raise InputError(
            "cu_seq_lens_q or seq_idx begin a document where position_ids do not restart. Restart position_ids with "
            "every document, or leave position_ids out."
        )
    return position_ids


# the configs for which the warning was given; configs have no hash
_mixing: WeakIdKeyDictionary = WeakIdKeyDictionary()


def warn_of_unseen_documents(config: Any) -> None:
    """Warn that packed documents attend to each other; once per config."""
    if config in _mixing:
        return
    _mixing[config] = True
    message = (
        f"position_ids restart within an example of this model ({type(config).__name__}), as in packed documents, but "
        "the documents attend to each other, because position_ids do not separate them after cached tokens, with a "
        "cache or an attention_mask, or in a model whose masks ignore position_ids. Also pass seq_idx, the number of "
        "each token's document, [batch, tokens], or cu_seq_lens_q and cu_seq_lens_k, without cached tokens."
    )
    # without the registry of `warnings.warn`, which would show each text only once per process
    warnings.warn_explicit(message, UserWarning, __file__, 0, module=__name__)


# Information that only the keyword arguments of an attention call have, not its mask: packed documents, global tokens.


def with_parsed_documents(
    module: nn.Module,
    attention_mask: Tensor | None,
    tokens: TokenMask,
    query_offset: QueryOffset,
    options: Mapping[str, Any],
    layer_spec: LayerPattern,
    query: Tensor,
    key: Tensor,
) -> TokenMask:
    """Return the token mask with the documents of `cu_seq_lens_q` and `seq_idx`; without a mask, of `position_ids`.

    transformers makes a mask for every call of a model, so it is missing only if another library has dropped it.

    Args:
        attention_mask: the mask that the layer got.
        tokens, query_offset: the content of `attention_mask`, if it is a token table.

    Raises:
        InputError: the documents do not fit these tokens, or the position_ids of a model with absolute positions do
            not restart with every document.
    """
    starts = parsed_starts(options, key.shape[0], query.shape[2])
    if starts is None:
        if attention_mask is not None:
            _warn_of_restarts(module, attention_mask, tokens, query_offset, options, query, key)
            return tokens
        positions = _positions(options, query)
        # a layer with full attention may not have requested a mask, and its positions may count something else
        if (
            positions is None
            or query.shape[2] != key.shape[2]
            or (layer_spec.attends_to_all and not is_overridden(NAME))
        ):
            return tokens
        starts = position_starts(positions)
        if not is_tracing(starts):
            if not on_host(starts).any():
                return tokens
            warn_of_parts(positions, NAME)
    elif query.shape[2] != key.shape[2] or (attention_mask is not None and not is_table(attention_mask)):
        raise InputError(
            f"cu_seq_lens_q and seq_idx cannot say where documents begin for {query.shape[2]} queries and "
            f"{key.shape[2]} keys, or with a mask matrix. Pass them without a cache and without such a mask."
        )
    elif not has_relative_positions(module, options):
        _require_restarts(module, starts, options, query)
    return join_documents(tokens, starts)


def join_documents(tokens: TokenMask, starts: Tensor) -> TokenMask:
    """Return the token mask with additional documents that begin at `starts`, bool [batch, keys]."""
    segments = tokens.segment_ids
    if segments is not None:
        starts = starts | pad(segments[:, 1:] != segments[:, :-1], (1, 0))
    return replace(tokens, segment_ids=1 + starts.cumsum(1))


def with_marked_tokens(
    module: nn.Module,
    tokens: TokenMask,
    query_offset: QueryOffset,
    options: Mapping[str, Any],
    layer_spec: LayerPattern,
    query: Tensor,
    key: Tensor,
) -> tuple[LayerPattern, TokenMask]:
    """Return what a layer follows and its token mask, with the global tokens of the call's `global_attention_mask`.

    The global tokens extend the pattern of the config, as `GlobalTokens` does. A layer that keeps its own attention
    ignores them. In an encoder-decoder they are tokens of the encoder, as in LED.

    Raises:
        InputError: the mask has another shape, processes share the text, or the pattern selects keys by content.
    """
    marked = options.get(MARKED)
    if marked is None or layer_spec.is_own or getattr(module, PART, None) == DECODER:
        return layer_spec, tokens
    run_untraced(note_marked, module)
    if layer_spec.shards is not None or layer_spec.pattern.chooses_by_content:
        what = (
            "processes share the texts" if layer_spec.shards is not None else f"they follow {shown(layer_spec.pattern)}"
        )
        raise InputError(
            f"Layers of a sparsified model cannot use {MARKED} if {what}. Leave it out, and write the positions into "
            "a pattern by position: band(...) | global(...)."
        )
    num_keys = key.shape[2]
    known: Any = num_keys if query_offset is None else query_offset + query.shape[2]
    if isinstance(known, Tensor):
        # while compiling, the number of written tokens in a static cache is unknown
        known = min(marked.shape[-1], num_keys)
    check_marked_shape(marked, key.shape[0], known)
    is_global = derived(lambda marked: pad(marked.bool(), (0, num_keys - marked.shape[1])), marked)
    return layer_spec.with_globals, replace(tokens, global_mask=is_global)


def has_relative_positions(module: nn.Module, options: Mapping[str, Any]) -> bool:
    """Return whether a layer is known to have relative positions (rotary or a bias), independent of the start."""
    config: Any = module.config
    if options.get("position_bias") is not None or getattr(config, "rope_parameters", None):
        return True
    # some configs have rope_theta although their positions are absolute
    is_absolute = getattr(config, "position_embedding_type", None) == "absolute"
    return getattr(config, "rope_theta", None) is not None and not is_absolute


def _require_restarts(module: nn.Module, starts: Tensor, options: Mapping[str, Any], query: Tensor) -> None:
    """Raise InputError unless the positions of a model with absolute positions restart where documents begin."""
    # recomputation needs no check, because the forward pass was checked; a compiled graph checks both
    if not torch.compiler.is_compiling() and is_computed_again():
        return
    positions = _positions(options, query, given_positions(module.config))
    problem = (
        f"cu_seq_lens_q or seq_idx begin documents, but the position_ids that reach this {type(module).__name__} "
        f"{'do not restart there' if positions is not None else 'are unknown'}, and its positions may be absolute. "
        "Pass position_ids that restart with every document. If the model does not pass them on to its layers, pack "
        "by position_ids only: with use_cache=False and without attention_mask, cu_seq_lens and seq_idx."
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

    given: the positions with which the model was called, in case the model does not pass them to its layers.
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
    """Warn, in a model's first layer, of documents that its mask does not separate; padding is not a document."""
    num_queries = query.shape[2]
    # compiling is checked before the length, which would become part of the graph; the cheapest checks come first
    if torch.compiler.is_compiling() or getattr(module, "layer_idx", None) or is_tracing(query) or num_queries == 1:
        return
    # positions that the model counts itself start no document, and a recomputed layer was checked in the forward pass
    if was_called_without(module.config) or is_computed_again():
        return
    positions = _positions(options, query, given_positions(module.config))
    if positions is None or not is_table(mask) or tokens.segment_ids is not None:
        return
    prefetch_to_host(positions, tokens.key_mask)
    is_token = None if tokens.key_mask is None else on_host(tokens.key_mask)
    if is_token is not None:
        first = key.shape[2] - num_queries if query_offset is None else int(query_offset)
        is_token = is_token[:, first : first + num_queries]
    if bool(position_starts(on_host(positions), is_token).any()):
        warn_of_unseen_documents(module.config)
