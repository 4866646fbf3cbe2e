"""Token top-k: which keys every query reads, by the scores of an indexer.

DeepSeek-V3.2 (arXiv:2512.02556), equations 1 and 2.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.layout.autocast import autocast_off
from hf_efficient_attn.layout.chosen.block_choice import MAX_SCORES
from hf_efficient_attn.layout.chosen.ranking import first_highest, tie_width
from hf_efficient_attn.layout.token_locations import NO_DOCUMENT, token_locations
from hf_efficient_attn.layout.token_mask import TokenMask


@torch.library.custom_op("hf_efficient_attn::choose_tokens", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def choose_tokens(
    queries: Tensor,
    keys: Tensor,
    weights: Tensor,
    masks: Sequence[Tensor | None],
    top_k: int,
    query_offset: int,
    query_start: Tensor | None,
) -> Tensor:
    """Return the keys of every query with the highest scores, int32 [B, 1, Nq, top_k] in ascending order, -1 for none.

    A query chooses among the keys of its document up to itself. Of scores that are equal but for rounding, the
    first key is chosen. No gradient passes. Memory is linear in the number of keys.

    Args:
        queries, keys, weights: of the indexer, see `index_scores`; keys [B, Nk, D].
        masks: the tensors of a `TokenMask`.
        query_offset: position of the first query; `query_start`, int64 scalar, replaces it.
    """
    offset = query_offset if query_start is None else int(query_start)
    (batch_size, num_queries, num_heads), num_keys = queries.shape[:3], keys.shape[1]
    documents = token_locations(TokenMask(*masks), num_keys, keys.device).documents
    chosen = queries.new_full((batch_size, 1, num_queries, top_k), -1, dtype=torch.int32)
    count = min(top_k, num_keys)
    step = max(1, MAX_SCORES // (batch_size * num_heads * num_keys))
    for first in range(0, num_queries, step):
        rows = slice(first, min(first + step, num_queries))
        scores = index_scores(queries[:, rows], keys[:, None], weights[:, rows])
        scores = scores.masked_fill(~open_pairs(documents, rows, offset), -torch.inf)
        # keys have positions: those that are narrow are no ties of equal tokens
        index, exists = first_highest(scores, count, tie_width(scores.dtype))
        chosen[:, 0, rows, :count] = index.masked_fill(~exists, -1).to(torch.int32)
    return chosen


@choose_tokens.register_fake
def _(queries: Tensor, keys: Tensor, weights: Tensor, masks: Any, top_k: int, *_: Any) -> Tensor:
    return queries.new_empty((queries.shape[0], 1, queries.shape[1], top_k), dtype=torch.int32)


def index_scores(queries: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """Return the sum over heads of weight · ReLU(query · key), [B, queries, keys], in float32 or wider.

    Args:
        queries: [B, queries, heads, D].
        keys: [B, 1, keys, D], or those of each query, [B, queries, keys, D].
        weights: [B, queries, heads].
    """
    wide = torch.promote_types(queries.dtype, torch.float32)
    with autocast_off(queries.device.type):
        products = head_products(queries.to(wide), keys.to(wide)).relu()
        return (weights.to(wide)[:, :, None] @ products)[:, :, 0]


def head_products(queries: Tensor, keys: Tensor) -> Tensor:
    """Return the products [B, queries, heads, keys] of queries and keys, shaped as for `index_scores`."""
    if keys.shape[1] == 1:
        return (queries.flatten(1, 2) @ keys[:, 0].transpose(1, 2)).unflatten(1, queries.shape[1:3])
    return queries @ keys.transpose(2, 3)


def open_pairs(documents: Tensor, rows: slice, query_offset: int) -> Tensor:
    """Return which keys are of a query's document and not after it, bool [batch or 1, queries, keys].

    Args:
        documents: of the keys, [batch or 1, keys].
        rows: which of the call's queries.
    """
    slots = torch.arange(documents.shape[1], device=documents.device)
    queries = slots[query_offset + rows.start : query_offset + rows.stop]
    own = documents[:, queries, None]
    return (own != NO_DOCUMENT) & (documents[:, None] == own) & (slots <= queries[:, None])
