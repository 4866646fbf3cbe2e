"""Token tables: a `TokenMask` as one small tensor, for code that is not ours and passes on tensors only.

This is the code of transformers' models, between their mask function and their layers, and `generate` with a static
cache. A token table is an int32 tensor [batch, kind, rows, keys]:

row 0 - 1 where the key is a token, 0 where it is padding or not written yet;
row 1 - 1 where the key belongs to one of the current queries, or to a later one (only where the queries are not the
    last keys, or with row 2);
row 2 - the number of the document it belongs to (only where sequences are packed).

A table without rows says that every key is a token. Its form tells the kind of the mask (`table_form`).
"""

import functools

import torch
from torch import Tensor

from hf_efficient_attn.attention.key_tokens import QueryOffset
from hf_efficient_attn.attention.table_form import TABLE_DTYPE, has_rows
from hf_efficient_attn.layout.cache import SMALL_BYTES, BoundedCache
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.layout.transfer import derived, on_host

# masks are shared as long as their table exists
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
    """Return what a token table says about the last `num_keys` keys; a PatternCache holds fewer than the table.

    The layers of a forward pass get the same tensors, so that backends derive other tensors from them only once.
    """
    if not has_rows(table):
        return TokenMask(), None
    if torch.compiler.is_compiling():
        return _tokens(table, batch_size, num_queries, num_keys)
    asked = (batch_size, num_queries, num_keys)
    return _read.get_of((table,), asked, lambda: _tokens(table, *asked))


def _tokens(table: Tensor, batch_size: int, num_queries: int, num_keys: int) -> tuple[TokenMask, QueryOffset]:
    rows = derived(lambda table: table.expand(batch_size, -1, -1, -1)[:, 0, :, -num_keys:], table)
    query_offset: QueryOffset = None
    if rows.shape[1] > 1 and num_queries != num_keys:
        is_compiling = torch.compiler.is_compiling()
        query_offset = rows[0, 1].argmax() if is_compiling else int(on_host(rows)[0, 1].argmax())
    # a view would keep the table alive
    segment_ids = derived(lambda rows: rows[:, 2].clone(), rows) if rows.shape[1] > 2 else None
    return TokenMask(derived(lambda rows: rows[:, 0] > 0, rows), segment_ids), query_offset
