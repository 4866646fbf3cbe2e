"""What the padding mask, the cache and the documents of a model's call say about its keys, as one `TokenMask`."""

from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.attention.cache import Origin
from hf_efficient_attn.attention.refusals import refuse_tracing
from hf_efficient_attn.errors import InputError
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.layout.transfer import as_lasting, bring, counted_from, derived, on_host

# position of the first query on the axis of the keys, a tensor if a compiler cannot know it; None: queries are the last
# keys
QueryOffset = int | Tensor | None


def unknown_start(query_offset: QueryOffset) -> Tensor | None:
    """Return the position of the first query if a compiler cannot know it, and only a tensor will; otherwise None."""
    return query_offset if isinstance(query_offset, Tensor) and torch.compiler.is_compiling() else None


def tokens_of_keys(
    config: Any,
    batch_size: int,
    num_queries: int,
    num_keys: int,
    past_tokens: int | Tensor,
    first_key: int,
    attention_mask: Tensor | None,
    documents: Tensor | None,
    is_causal: bool,
    device: torch.device | str,
) -> tuple[TokenMask, QueryOffset]:
    """Return which keys are tokens and already written, their documents, and the position of the first query.

    Args:
        config: the config of the model, for which a `PatternCache` must have been made.
        past_tokens, first_key: positions of the first query and of the first key in the text.
        attention_mask: [batch, tokens], 1 = a token, from the text's first token on.
        documents: the number of each key's document, int [batch, keys]; None: every example is one document.
        is_causal: if False, the queries need not be among the keys.

    Raises:
        InputError: a padding mask that is too short.
        UnsupportedBackendError: under `torch.jit.trace`.
    """
    refuse_tracing()
    attention_mask = as_lasting(attention_mask)
    bring(attention_mask, past_tokens)
    length = num_queries if is_causal else 0
    # torch 2.11 traces no conversion of such a number
    cache, first_key = (first_key.cache, 0) if isinstance(first_key, Origin) else (None, int(first_key))
    is_token = key_padding(attention_mask, batch_size, num_keys, first_key, past_tokens, length)
    if cache is not None:
        cache.follow(config, is_token)
    query_offset: QueryOffset = None
    # otherwise the queries are the last keys, or no keys at all
    if is_causal and not (isinstance(past_tokens, int) and past_tokens - first_key + num_queries == num_keys):
        slots = counted_from(first_key, num_keys, device)
        is_token = derived(_written, slots, past_tokens, num_queries, batch_size, is_token)
        query_offset = None if num_queries == num_keys else _difference(past_tokens, first_key)
    elif is_token is not None and _are_all(is_token):
        is_token = None
    return TokenMask(is_token, documents), query_offset


def _written(
    slots: Tensor, past_tokens: int | Tensor, num_queries: int, batch_size: int, is_token: Tensor | None
) -> Tensor:
    """Return which keys up to the last query are tokens, bool [batch, keys]; later slots of a cache are empty."""
    written = (slots < past_tokens + num_queries).expand(batch_size, -1)
    return written.clone() if is_token is None else is_token & written


def _difference(position: int | Tensor, first: int) -> int | Tensor:
    if isinstance(position, Tensor):
        return position.reshape(()) - first if torch.compiler.is_compiling() else int(on_host(position)) - first
    return position - first


def key_padding(
    attention_mask: Tensor | None,
    batch_size: int,
    kv_length: int,
    kv_offset: int,
    q_offset: int | Tensor,
    q_length: int,
) -> Tensor | None:
    """Return the part of a 2-D padding mask that belongs to the keys, bool [batch, kv_length], False beyond its end.

    q_length: the number of queries, or 0 if these are not among the keys.

    Raises:
        InputError: the mask ends before the last query, or has another batch size.
    """
    if attention_mask is None:
        return None
    if attention_mask.dim() != 2:
        raise InputError(
            f"attention_mask has shape {list(attention_mask.shape)}; it must be [batch, tokens], or a mask "
            "matrix [batch, 1, queries, keys]."
        )
    if not torch.compiler.is_compiling() and attention_mask.shape[0] != batch_size:
        raise InputError(
            f"attention_mask has shape {list(attention_mask.shape)}, but the batch has {batch_size} rows. Pass a mask "
            "of one row for each."
        )
    if isinstance(q_offset, int) and q_length and attention_mask.shape[1] < q_offset + q_length:
        raise InputError(
            f"attention_mask covers {attention_mask.shape[1]} tokens, but {q_offset} are cached and {q_length} are "
            f"new. Pass a mask of {q_offset + q_length} columns, cached tokens first; for another text, pass an "
            "empty cache."
        )
    last = kv_offset + kv_length

    def of_keys(mask: Tensor) -> Tensor:
        # never a view of memory to which the caller may write
        is_token = mask != 0
        if is_token.shape[1] < last:
            is_token = torch.nn.functional.pad(is_token, (0, last - is_token.shape[1]))
        return is_token[:, kv_offset:last].expand(batch_size, -1)

    return derived(of_keys, attention_mask)


def _are_all(is_token: Tensor) -> bool:
    """Return whether all keys are tokens; False while tracing, when this is unknown."""
    return not torch.compiler.is_compiling() and bool(on_host(is_token).all())
