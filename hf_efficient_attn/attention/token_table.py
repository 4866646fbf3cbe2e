"""What a model's masks say about every key, as one small tensor: the mask function of the "efficient" attention.

A token table is an int32 tensor [batch, kind, rows, keys], which every cache and `generate` carry along like any mask:

row 0 - 1 where the key is a token, 0 where it is padding or not written yet;
row 1 - 1 where the key belongs to one of the current queries (only where a cache has room after the queries);
row 2 - the number of the document it belongs to (only where sequences are packed).

A table without rows says that every key is a token. What kind of mask it is stands in its form (`table_form`).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from transformers.masking_utils import causal_mask_function

from hf_efficient_attn.attention.cache import Origin
from hf_efficient_attn.attention.given_inputs import given_positions
from hf_efficient_attn.attention.layer_patterns import NAME
from hf_efficient_attn.attention.overridden import refuse_lost_padding
from hf_efficient_attn.attention.table_form import TABLE_DTYPE, has_rows, is_causal_request, with_kind
from hf_efficient_attn.errors import InputError, UnsupportedBackendError
from hf_efficient_attn.layout.cache import SMALL_BYTES, BoundedCache
from hf_efficient_attn.layout.host_copies import as_lasting, bring, counted_from, derived, lasting, on_host

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

NOT_EXPRESSIBLE = (
    "This model's mask is not one of causal, bidirectional, sliding, chunked or packed attention with padding: it lets "
    "tokens read tokens that a pattern of positions cannot name (image tokens, prefixes, ...). The efficient attention "
    "cannot compute it: load the model with attn_implementation='sdpa' and without attention_pattern."
)


@dataclass(frozen=True)
class TokenColumns:
    """A token table, read.

    Attributes:
        key_mask: bool [batch, keys], True = a token.
        segment_ids: int [batch, keys]; None: every example is one document.
        query_offset: position of the first query on the axis of the keys; None: the queries are the last keys.
    """

    key_mask: Tensor | None = None
    segment_ids: Tensor | None = None
    query_offset: Tensor | int | None = None


# columns are shared as long as their table lives
_read: BoundedCache[TokenColumns] = BoundedCache(SMALL_BYTES)


def make_table(
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
    documents: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """Return the token table of a call, without its kind, or None if no key is masked, packed or still to be written.

    documents: of each key, [batch, kv_length], where the caller knows them; the mask function is then not asked.

    Raises:
        InputError: a padding mask that is too short.
        UnsupportedBackendError: a mask that is not causal, bidirectional, sliding, chunked or packed attention.
    """
    is_causal = is_causal_request(kwargs)
    can_skip = allow_is_causal_skip if is_causal else kwargs["allow_is_bidirectional_skip"]
    attention_mask = as_lasting(attention_mask)
    slots = counted_from(int(kv_offset), kv_length, device)
    # what this, or layers later, want to know of the host
    asked = (attention_mask, given_positions(kwargs.get("config")), q_offset)
    # without these, the mask is plain causal or bidirectional
    if documents is None and (local_size is not None or not can_skip):
        probe = Probe(mask_function, batch_size, slots, use_vmap)
        documents = probe.checked_documents(is_causal, local_size, asked)
    else:
        bring(*asked)

    is_token = key_padding(
        attention_mask, batch_size, kv_length, int(kv_offset), q_offset, q_length if is_causal else 0
    )
    if isinstance(kv_offset, Origin):
        kv_offset.cache.check(kwargs.get("config"))
        kv_offset.cache.padding.note(is_token)
    # the queries are the last keys, unless there is room after them; a table with documents has this row, too
    are_last = isinstance(q_offset, int) and q_offset - int(kv_offset) + q_length == kv_length
    has_queries = is_causal and (documents is not None or not are_last)
    if not has_queries and documents is None and (is_token is None or _are_all(is_token)):
        return None
    build = functools.partial(_placed_table, batch_size, q_length, has_queries)
    return derived(build, slots, is_token, documents, q_offset)


@functools.wraps(make_table)
def requested_table(batch_size: int, q_length: int, kv_length: int, *args: Any, **kwargs: Any) -> Tensor:
    """Return the token table of a mask that a model of transformers asks for, with its kind.

    Called by transformers once per forward and kind of mask, with the arguments of its `sdpa_mask`.

    Raises:
        InputError: a padding mask that is too short, or no tokens at all.
        UnsupportedBackendError: a mask that is not causal, bidirectional, sliding, chunked or packed attention.
    """
    if torch.compiler.is_compiling():
        return _requested(batch_size, q_length, kv_length, *args, **kwargs)
    if 0 in (batch_size, q_length):
        raise InputError(f"There are no tokens: [batch, tokens] = [{batch_size}, {q_length}]. Leave such batches out.")
    with lasting():
        return _requested(batch_size, q_length, kv_length, *args, **kwargs)


def _requested(batch_size: int, q_length: int, kv_length: int, *args: Any, **kwargs: Any) -> Tensor:
    table = make_table(batch_size, q_length, kv_length, *args, **kwargs)
    if table is None:
        table = torch.empty(batch_size, 1, 0, kv_length, dtype=TABLE_DTYPE, device=kwargs.get("device", "cpu"))
    refuse_lost_padding(table, NAME)
    is_causal = is_causal_request(kwargs)
    return derived(lambda table: with_kind(table, is_causal), table)


def join_documents(table: Tensor | None, starts: Tensor, num_keys: int) -> Tensor:
    """Return a token table of the same kind in which further documents begin; `starts`: bool [batch, keys]."""
    batch_size, columns = starts.shape[0], TokenColumns()
    if table is not None and has_rows(table):
        columns = _columns(table, batch_size, num_keys, num_keys)
    if columns.segment_ids is not None:
        segments = columns.segment_ids
        starts = starts | torch.nn.functional.pad(segments[:, 1:] != segments[:, :-1], (1, 0))
    joined = _table(batch_size, num_keys, columns.key_mask, None, 1 + starts.cumsum(1), starts.device)
    return joined if table is None else joined.expand(-1, table.shape[1], -1, -1)


def _placed_table(
    batch_size: int,
    q_length: int,
    has_queries: bool,
    slots: Tensor,
    is_token: Tensor | None,
    documents: Tensor | None,
    q_offset: int | Tensor,
) -> Tensor:
    """Return the table of these keys; `has_queries`: it says which of them belong to the queries."""
    is_query = None
    if has_queries:
        is_query = (slots >= q_offset) & (slots < q_offset + q_length)
        written = slots < q_offset + q_length
        is_token = written if is_token is None else is_token & written
    return _table(batch_size, slots.shape[0], is_token, is_query, documents, slots.device)


def _table(
    batch_size: int,
    kv_length: int,
    is_token: Tensor | None,
    is_query: Tensor | None,
    documents: Tensor | None,
    device: torch.device | str,
) -> Tensor:
    ones = torch.ones(batch_size, kv_length, dtype=TABLE_DTYPE, device=device)
    rows = [ones if is_token is None else is_token.to(TABLE_DTYPE).expand(batch_size, -1)]
    if is_query is not None or documents is not None:
        rows.append(ones if is_query is None else is_query.to(TABLE_DTYPE).expand(batch_size, -1))
    if documents is not None:
        rows.append(documents.to(TABLE_DTYPE))
    return torch.stack(rows, 1)[:, None]


def read_table(table: Tensor | None, batch_size: int, num_queries: int, num_keys: int) -> TokenColumns:
    """Return what a token table says about the last `num_keys` keys; a pattern cache holds fewer than the table has.

    The layers of a forward pass get the same tensors, and so what backends make of them is made once.
    """
    if table is None or not has_rows(table):
        return TokenColumns()
    if torch.compiler.is_compiling():
        return _columns(table, batch_size, num_queries, num_keys)
    asked = (batch_size, num_queries, num_keys)
    return _read.get_of((table,), asked, lambda: _columns(table, *asked))


def _columns(table: Tensor, batch_size: int, num_queries: int, num_keys: int) -> TokenColumns:
    rows = derived(lambda table: table.expand(batch_size, -1, -1, -1)[:, 0, :, -num_keys:], table)
    query_offset: Tensor | int | None = None
    if rows.shape[1] > 1 and num_queries != num_keys:
        is_compiling = torch.compiler.is_compiling()
        query_offset = rows[0, 1].argmax() if is_compiling else int(on_host(rows)[0, 1].argmax())
    # a view would keep the table alive
    segment_ids = derived(lambda rows: rows[:, 2].clone(), rows) if rows.shape[1] > 2 else None
    return TokenColumns(derived(lambda rows: rows[:, 0] > 0, rows), segment_ids, query_offset)


def key_padding(
    attention_mask: Tensor | None,
    batch_size: int,
    kv_length: int,
    kv_offset: int,
    q_offset: int | Tensor,
    q_length: int,
) -> Tensor | None:
    """Return the part of a 2-D padding mask that belongs to the keys, bool [batch, kv_length]; False beyond its end.

    q_length: 0: the queries are not among the keys.

    Raises:
        InputError: the mask ends before the last query, or is of another batch.
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
        is_token = mask.bool()
        if is_token.shape[1] < last:
            is_token = torch.nn.functional.pad(is_token, (0, last - is_token.shape[1]))
        return is_token[:, kv_offset:last]

    return derived(of_keys, attention_mask)


@dataclass(frozen=True)
class Probe:
    """Asks a mask function of transformers about chosen pairs of positions, never about all of them.

    Attributes:
        batch_size: examples.
        positions: of the keys, int [keys].
        use_vmap: the function takes one position at a time.
    """

    mask_function: MaskFunction
    batch_size: int
    positions: Tensor
    use_vmap: bool

    def checked_documents(self, is_causal: bool, local_size: int | None, asked: tuple[Any, ...]) -> Tensor | None:
        """Return the number of the document of each key, [batch, keys] from 1; None: all are one document.

        A key starts a document if it may not read the key before it. Chunks of chunked attention are documents, too.

        Args:
            asked: tensors that are read with the answers, as they will be asked for.

        Raises:
            UnsupportedBackendError: documents and distances do not say all that the mask function says.
        """
        follows = self.allowed(self.positions[1:], self.positions[:-1])
        documents = 1 + torch.nn.functional.pad((~follows).cumsum(1), (1, 0))
        are_right = self.comparisons(documents, is_causal, local_size)
        if torch.compiler.is_compiling():
            for is_right in are_right:
                torch._assert_async(is_right, NOT_EXPRESSIBLE)
            return documents
        answers = torch.stack([follows.all(), *are_right])
        bring(answers, documents, *asked)
        are_one, *are_right = on_host(answers).tolist()
        if not all(are_right):
            raise UnsupportedBackendError(NOT_EXPRESSIBLE)
        return None if are_one else documents

    def comparisons(self, documents: Tensor, is_causal: bool, local_size: int | None) -> list[Tensor]:
        """Return whether documents and distances say what the mask function says, bool [] each.

        Neighbours tell for the masks that transformers makes; for a model's own function every power of two is probed.
        """
        are_right = []
        num_keys = self.positions.shape[0]
        distance = 1
        while distance < num_keys and (distance == 1 or self.use_vmap):
            before, after = self.positions[:-distance], self.positions[distance:]
            is_near = local_size is None or distance < local_size + (0 if is_causal else 1)
            same = torch.full((1, num_keys - distance), is_near, device=self.positions.device)
            same = same & (documents[:, :-distance] == documents[:, distance:])
            ahead = torch.zeros_like(same) if is_causal else same
            is_right = (self.allowed(after, before) == same) & (self.allowed(before, after) == ahead)
            are_right.append(is_right.all())
            distance *= 2
        return are_right

    def allowed(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return whether each query may read the key at the same place of `keys`, bool [batch, places]."""
        batch = torch.arange(self.batch_size, device=keys.device)
        head = torch.zeros((), dtype=torch.long, device=keys.device)
        if not self.use_vmap:
            answer = self.mask_function(batch[:, None], head, queries[None], keys[None])
            return answer.expand(self.batch_size, keys.shape[0])
        one_example = torch.vmap(self.mask_function, in_dims=(None, None, 0, 0))
        with TransformGetItemToIndex():
            return torch.vmap(one_example, in_dims=(0, None, None, None))(batch, head, queries, keys)


def _are_all(is_token: Tensor) -> bool:
    """Return whether all keys are tokens, where asking is possible; while tracing: False."""
    return not torch.compiler.is_compiling() and bool(on_host(is_token).all())
