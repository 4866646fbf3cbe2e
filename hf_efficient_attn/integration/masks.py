"""Token tables: a `TokenMask` as one small tensor, for code that passes on only tensors.

Such code is in the models of transformers, between their mask function and their layers, and in `generate` with a
static cache. A token table is an int32 tensor [batch, kind, rows, keys]:

row 0 - 1 if the key is a token, 0 if it is padding or not written yet;
row 1 - 1 if the key belongs to one of the current queries, or to a later one (only if the queries are not the last
    keys, or with row 2);
row 2 - the number of the document that the key belongs to (only if sequences are packed).

A table without rows says that every key is a token. Its form tells the kind of the mask (`names.py`).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from transformers.masking_utils import causal_mask_function, sdpa_mask

from hf_efficient_attn.attention.build_call import QueryOffset
from hf_efficient_attn.errors import InputError, UnsupportedBackendError
from hf_efficient_attn.integration.forward_context import given_positions, whole_table
from hf_efficient_attn.integration.layer_patterns import NAME
from hf_efficient_attn.integration.model_info import refuse_lost_padding
from hf_efficient_attn.integration.names import TABLE_DTYPE, has_rows, is_causal_request, with_kind
from hf_efficient_attn.integration.pattern_cache import Origin
from hf_efficient_attn.integration.selected_keys import is_indexed
from hf_efficient_attn.layout.cache import SMALL_BYTES, BoundedCache
from hf_efficient_attn.layout.token_mask import NO_MASK, TokenMask
from hf_efficient_attn.layout.tracing import refuse_tracing
from hf_efficient_attn.layout.transfer import (
    as_normal_tensor,
    counted_from,
    derived,
    on_host,
    outside_inference_mode,
    prefetch_to_host,
)

# the masks of a table are kept as long as the table exists
_read: BoundedCache[tuple[TokenMask, QueryOffset]] = BoundedCache(SMALL_BYTES)


def empty_table(batch_size: int, num_keys: int, device: torch.device | str) -> Tensor:
    """Return the table that says that every key is a token, without its kind."""
    return torch.empty(batch_size, 1, 0, num_keys, dtype=TABLE_DTYPE, device=device)


def write_table(tokens: TokenMask, query_offset: QueryOffset, num_queries: int) -> Tensor | None:
    """Return the token table of a mask without global tokens, without its kind; None: every key is a token.

    num_queries: how many of the last keys are queries, if the offset is None.
    """
    if tokens.is_empty:
        return None
    build = functools.partial(_written_table, num_queries)
    return derived(build, tokens.key_mask, tokens.segment_ids, query_offset)


def _written_table(
    num_queries: int, key_mask: Tensor | None, documents: Tensor | None, query_offset: QueryOffset
) -> Tensor:
    given: Tensor = documents if key_mask is None else key_mask  # type: ignore[assignment]
    ones = torch.ones_like(given, dtype=TABLE_DTYPE)
    rows = [ones if key_mask is None else key_mask.to(TABLE_DTYPE)]
    if query_offset is not None or documents is not None:
        first = given.shape[1] - num_queries if query_offset is None else query_offset
        rows.append((torch.arange(given.shape[1], device=given.device) >= first).to(TABLE_DTYPE).expand_as(ones))
    if documents is not None:
        rows.append(documents.to(TABLE_DTYPE))
    return torch.stack(rows, 1)[:, None]


def read_table(table: Tensor, batch_size: int, num_queries: int, num_keys: int) -> tuple[TokenMask, QueryOffset]:
    """Return the token mask of the last `num_keys` keys of a token table, and the position of the first query.

    A PatternCache holds fewer keys than the table. The layers of a forward pass get the same tensors, so that backends
    derive other tensors from them only once.
    """
    if not has_rows(table):
        return NO_MASK, None
    if torch.compiler.is_compiling():
        return _tokens(table, batch_size, num_queries, num_keys)
    requested = (batch_size, num_queries, num_keys)
    return _read.get_of((table,), requested, lambda: _tokens(table, *requested))


def _tokens(table: Tensor, batch_size: int, num_queries: int, num_keys: int) -> tuple[TokenMask, QueryOffset]:
    rows = derived(lambda table: table.expand(batch_size, -1, -1, -1)[:, 0, :, -num_keys:], table)
    query_offset: QueryOffset = None
    if rows.shape[1] > 1 and num_queries != num_keys:
        is_compiling = torch.compiler.is_compiling()
        query_offset = rows[0, 1].argmax() if is_compiling else int(on_host(rows)[0, 1].argmax())
    # a view would keep the table alive
    segment_ids = derived(lambda rows: rows[:, 2].clone(), rows) if rows.shape[1] > 2 else None
    return TokenMask(derived(lambda rows: rows[:, 0] > 0, rows), segment_ids), query_offset


# Packed documents that only a mask function of transformers knows; calls for some of the pairs find them.


MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

# without double quotes, which torch's compiler for CPUs pastes into C++ as they are
NOT_EXPRESSIBLE = (
    "This model's mask is not one of causal, bidirectional, sliding, chunked or packed attention with padding: it "
    "allows pairs that no pattern by position describes (image tokens, prefixes, ...). "
    "attn_implementation='efficient' cannot compute it: load the model with attn_implementation='sdpa' and without "
    "attention_pattern."
)


@dataclass(frozen=True)
class Probe:
    """Calls a mask function of transformers for some pairs of positions, never for all of them.

    Attributes:
        batch_size: the number of examples.
        positions: the positions of the keys, int [keys].
        use_vmap: whether the function takes one position at a time.
    """

    mask_function: MaskFunction
    batch_size: int
    positions: Tensor
    use_vmap: bool

    def checked_documents(self, is_causal: bool, local_size: int | None, requested: tuple[Any, ...]) -> Tensor | None:
        """Return the number of each key's document, [batch, keys] from 1; None: all keys are one document.

        A key starts a document if it may not attend to the previous key. Chunks of chunked attention count as
        documents.

        Args:
            requested: other tensors that will be needed on the host, copied together with the answers.

        Raises:
            UnsupportedBackendError: documents and distances do not describe the mask completely.
        """
        before, is_there = self.keys_before(1)
        follows = self.allowed(self.positions, self.positions[before]) | ~is_there
        documents = 1 + (~follows).cumsum(1)
        are_right = self.comparisons(documents, is_causal, local_size)
        if torch.compiler.is_compiling():
            for is_right in are_right:
                torch._assert_async(is_right, NOT_EXPRESSIBLE)
            return documents
        answers = torch.stack([follows.all(), *are_right])
        prefetch_to_host(answers, documents, *requested)
        are_one, *are_right = on_host(answers).tolist()
        if not all(are_right):
            raise UnsupportedBackendError(NOT_EXPRESSIBLE)
        return None if are_one else documents

    def comparisons(self, documents: Tensor, is_causal: bool, local_size: int | None) -> list[Tensor]:
        """Return whether documents and distances agree with the mask function, bool [] each.

        Neighbours suffice for the masks of transformers; for a model's own function, powers of two are probed.
        """
        are_right = []
        num_keys = self.positions.shape[0]
        distance = 1
        # this order of conditions allows two tokens in an exported program
        while (distance == 1 or self.use_vmap) and distance < num_keys:
            place, is_there = self.keys_before(distance)
            before, after = self.positions[place], self.positions
            is_near = local_size is None or distance < local_size + (0 if is_causal else 1)
            same = (documents[:, place] == documents) & is_near
            ahead = torch.zeros_like(same) if is_causal else same
            # not by ==, which torch's compiler for CPUs cannot take of a constant
            is_wrong = (self.allowed(after, before) ^ same) | (self.allowed(before, after) ^ ahead)
            are_right.append((~is_wrong | ~is_there).all())
            distance *= 2
        return are_right

    def keys_before(self, distance: int) -> tuple[Tensor, Tensor]:
        """Return the index of the key `distance` before each key, and whether there is one; both [keys].

        Both have an entry for every key, because with fewer entries an exported program would not accept lengths that
        leave a single entry.
        """
        index = torch.arange(self.positions.shape[0], device=self.positions.device) - distance
        return index.clamp(min=0), index >= 0

    def allowed(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return whether each query may attend to the key at the same index of `keys`, bool [batch, queries]."""
        batch = torch.arange(self.batch_size, device=keys.device)
        head = torch.zeros((), dtype=torch.long, device=keys.device)
        if not self.use_vmap:
            answer = self.mask_function(batch[:, None], head, queries[None], keys[None])
            return answer.expand(self.batch_size, keys.shape[0])
        one_example = torch.vmap(self.mask_function, in_dims=(None, None, 0, 0))
        with TransformGetItemToIndex():
            return torch.vmap(one_example, in_dims=(0, None, None, None))(batch, head, queries, keys)


# The `TokenMask` that combines the padding mask, the cache and the documents of a model's call.


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
        config: the config of the model; a `PatternCache` in use must fit it.
        past_tokens, first_key: positions of the first query and of the first key in the text.
        attention_mask: [batch, tokens], 1 = a token, from the text's first token on.
        documents: the number of each key's document, int [batch, keys]; None: every example is one document.
        is_causal: if False, the queries need not be among the keys.

    Raises:
        InputError: a padding mask that is too short.
        UnsupportedBackendError: under `torch.jit.trace`.
    """
    refuse_tracing()
    attention_mask = as_normal_tensor(attention_mask)
    prefetch_to_host(attention_mask, past_tokens)
    length = num_queries if is_causal else 0
    # torch 2.11 cannot trace the conversion of an Origin to int
    cache, first_key = (first_key.cache, 0) if isinstance(first_key, Origin) else (None, int(first_key))
    is_token = key_padding(attention_mask, batch_size, num_keys, first_key, past_tokens, length)
    if cache is not None:
        cache.follow(config, is_token)
    query_offset: QueryOffset = None
    # otherwise the queries are the last keys, or are not among the keys
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
    """Return which keys up to the last query are tokens, bool [batch, keys]; False for later slots, which are empty."""
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

    q_length: the number of queries, or 0 if the queries are not among the keys.

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
            "with one row for each of them."
        )
    if isinstance(q_offset, int) and q_length and attention_mask.shape[1] < q_offset + q_length:
        raise InputError(
            f"attention_mask covers {attention_mask.shape[1]} tokens, but {q_offset} are cached and {q_length} are "
            f"new. Pass a mask of {q_offset + q_length} columns, cached tokens first; for another text, pass an "
            "empty cache."
        )
    last = kv_offset + kv_length

    def of_keys(mask: Tensor) -> Tensor:
        # not a view of memory that the caller may overwrite
        is_token = mask != 0
        if is_token.shape[1] < last:
            is_token = torch.nn.functional.pad(is_token, (0, last - is_token.shape[1]))
        return is_token[:, kv_offset:last].expand(batch_size, -1)

    return derived(of_keys, attention_mask)


def _are_all(is_token: Tensor) -> bool:
    """Return whether all keys are tokens; False while tracing, when this is unknown."""
    return not torch.compiler.is_compiling() and bool(on_host(is_token).all())


# The token table of a mask that a model of transformers requests from `efficient_mask` (`interface.py`).


def requested_table(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = causal_mask_function,  # type: ignore[assignment]
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor:
    """Return the token table of a mask that a model of transformers requests, with its kind.

    Layers that select tokens by an indexer (DSA) need a mask over all pairs, and get it as bool [batch, 1, queries,
    keys].

    Raises:
        InputError: a padding mask that is too short, or no tokens at all.
        UnsupportedBackendError: a mask that is not causal, bidirectional, sliding, chunked or packed attention.
    """
    if not torch.compiler.is_compiling() and 0 in (batch_size, q_length):
        raise InputError(f"There are no tokens: [batch, tokens] = [{batch_size}, {q_length}]. Leave such batches out.")
    is_causal, config = is_causal_request(kwargs), kwargs.get("config")
    lengths = (batch_size, q_length, kv_length, q_offset, kv_offset)
    if is_causal and not allow_is_causal_skip and local_size is None and is_indexed(config):
        as_matrix: Any = sdpa_mask
        options = {"allow_is_causal_skip": False, "use_vmap": use_vmap, "device": device}
        return as_matrix(*lengths, mask_function, attention_mask, **options)  # type: ignore[no-any-return]
    table = whole_table(config)
    if table is not None:
        return with_kind(table, is_causal)
    can_skip = allow_is_causal_skip if is_causal else kwargs["allow_is_bidirectional_skip"]
    with outside_inference_mode():
        attention_mask = as_normal_tensor(attention_mask)
        # tensors that this function or later layers need on the host
        requested = (attention_mask, given_positions(config), q_offset)
        documents = None
        # without these, the mask is plain causal or bidirectional
        if local_size is not None or not can_skip:
            probe = Probe(mask_function, batch_size, counted_from(int(kv_offset), kv_length, device), use_vmap)
            documents = probe.checked_documents(is_causal, local_size, requested)
        prefetch_to_host(*requested)
        tokens, query_offset = tokens_of_keys(config, *lengths, attention_mask, documents, is_causal, device)
        table = write_table(tokens, query_offset, q_length if is_causal else kv_length)
        table = empty_table(batch_size, kv_length, device) if table is None else table
        refuse_lost_padding(table, NAME)
        return derived(functools.partial(with_kind, is_causal=is_causal), table)
