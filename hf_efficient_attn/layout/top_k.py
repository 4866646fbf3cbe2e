"""Top-k selection for every query: of blocks of keys, by the means of the blocks, and of keys, by an indexer.

Blocks: Lu et al., "MoBA: Mixture of Block Attention" (arXiv:2502.13189), equations 3 to 6. Keys: DeepSeek-V3.2
(arXiv:2512.02556), equations 1 and 2.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.layout.cache import SMALL_BYTES, BoundedCache
from hf_efficient_attn.layout.token_locations import NO_DOCUMENT, TokenLocations, locations_on_host, token_locations
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.layout.tracing import autocast_off
from hf_efficient_attn.layout.transfer import send

# The highest scores of a row, some of which may be equal up to rounding.
#
# Equal tokens have equal scores as long as positions have not entered: in the first layer of a model with relative
# positions, or without any. But their states are equal only up to rounding, which differs between shapes, kernels and
# processors. If scores were compared to the last bit, padding and the other examples of a batch would decide which of
# several equal tokens are chosen. Therefore scores within `tie_width` of the last chosen score count as equal to it,
# and the first of them are chosen.
#
# Scores are not rounded to a grid, whose edges would separate equal scores again; they are compared with a score of
# their own row. Rounding decides between two different scores only if they lie within that rounding of each other, as
# in any comparison.


# the largest difference between sums of products that kernels add in different orders, in units of rounding
ROUNDINGS_OF_SUMS = 64
# on CPUs, up to this many highest scores are found one by one, which takes less time than `topk`
FEW_HIGHEST = 8


def tie_width(dtype: torch.dtype) -> float:
    """Return how far apart scores of equal states of a dtype may be, relative to the size of scores.

    Sums are in float32 or wider; states of a narrow dtype have been rounded to it, by half a unit in the last place.
    """
    wide = torch.promote_types(dtype, torch.float32)
    width = ROUNDINGS_OF_SUMS * torch.finfo(wide).eps
    return width if wide == dtype else width + torch.finfo(dtype).eps / 2


def highest(scores: Tensor, count: int, width: float | Tensor = 0.0) -> Tensor:
    """Return which scores are the `count` highest of their row [..., n], the first of equal ones: bool [..., n].

    width: scores at most this far from the last chosen one count as equal to it; a number, or [..., 1].

    >>> highest(torch.tensor([[1.0, 3.0, 1.0001, 1.0, 2.0]]), 3, 1e-3).tolist()
    [[True, True, False, False, True]]
    """
    return _highest(scores, scores.topk(count, sorted=False).values.amin(-1, keepdim=True), count, width)


def _highest(scores: Tensor, least: Tensor, count: int, width: float | Tensor) -> Tensor:
    is_above = scores > least + width
    is_level = (scores >= least - width) & ~is_above
    room = count - is_above.sum(-1, keepdim=True)
    return is_above | (is_level & (is_level.cumsum(-1, dtype=torch.int32) <= room))


def listed(is_listed: Tensor, count: int) -> Tensor:
    """Return the indices of true entries in ascending order, [..., count], padded with -1 at the start.

    >>> listed(torch.tensor([[True, False, True]]), 3).tolist()
    [[-1, 0, 2]]
    """
    number = is_listed.cumsum(-1)
    # entries that are not listed go to an extra place at the start, which is cut off
    place = torch.where(is_listed, number + (count - number[..., -1:]), 0)
    index = torch.arange(is_listed.shape[-1], device=is_listed.device).expand(place.shape)
    found = torch.full((*place.shape[:-1], count + 1), -1, device=is_listed.device)
    return found.scatter(-1, place, index)[..., 1:]


def first_highest(scores: Tensor, count: int, relative_width: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return the indices of the highest scores in ascending order, the first of equal ones, and which are not -inf.

    The scores may be overwritten.

    relative_width: how far apart equal scores may be, relative to the largest chosen one; see `tie_width`.

    >>> first_highest(torch.tensor([[1.0, 3.0, 1.0, 1.0, 2.0]]), 3)[0].tolist()
    [[0, 1, 4]]
    """
    if count <= FEW_HIGHEST and scores.device.type == "cpu":
        return _few_highest(scores, count, relative_width)
    top = scores.topk(count, sorted=False).values
    least = top.amin(-1, keepdim=True)
    width = _width(top.amax(-1, keepdim=True), least, relative_width)
    index = listed(_highest(scores, least, count, width) & (scores > -torch.inf), count)
    return index.clamp(min=0), index >= 0


def _width(largest: Tensor, least: Tensor, relative_width: float) -> Tensor:
    """Return how far from the least chosen score others count as equal to it; `largest` and `least` may be -inf."""
    finite = torch.finfo(largest.dtype).max
    sizes = torch.maximum(largest.abs(), least.abs().where(least > -torch.inf, 0))
    return relative_width * sizes.clamp(max=finite)


def _few_highest(scores: Tensor, count: int, relative_width: float) -> tuple[Tensor, Tensor]:
    """Return `first_highest`, finding scores one by one; of equal numbers, `max` returns the first."""
    size, values, found = scores.shape[-1], [], []
    for _ in range(count):
        value, index = scores.max(-1, keepdim=True)
        scores.scatter_(-1, index, -torch.inf)
        values.append(value)
        found.append(index)
    width = _width(values[0], values[-1], relative_width)
    top, index = torch.cat(values, -1), torch.cat(found, -1)
    places = torch.where(top > -torch.inf, index, size).sort(-1).values
    # rows in which another score is equal to the last one that was found
    best_left = scores.amax(-1, keepdim=True)
    is_tied = ((best_left >= values[-1] - width) & (best_left > -torch.inf))[..., 0]
    if bool(is_tied.any()):
        rows = scores[is_tied].scatter(-1, index[is_tied], top[is_tied])
        places[is_tied] = listed(_highest(rows, values[-1][is_tied], count, width[is_tied]), count)
    return places.clamp(max=size - 1), places < size


# the number of scores in memory at a time, and on CPUs the number that stays in a cache of the processor
MAX_SCORES, CACHED_SCORES = 1 << 22, 1 << 20


@dataclass(frozen=True, eq=False)
class DocumentBlocks:
    """The blocks of the documents of each example, in the order of their keys. Shapes: [batch or 1, ...].

    Attributes:
        of_keys: int [..., keys], the index of each key's block here; masked keys have the index after the last block.
        numbers: int [..., blocks], the number of a block in its document; any number for blocks that do not exist.
        documents: int [..., blocks], the document of a block; NO_DOCUMENT if the block does not exist.
        of_tokens: the location of each key.
    """

    of_keys: Tensor
    numbers: Tensor
    documents: Tensor
    of_tokens: TokenLocations


_blocks: BoundedCache[DocumentBlocks] = BoundedCache(SMALL_BYTES)


@torch.library.custom_op("hf_efficient_attn::choose_blocks", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def choose_blocks(
    q: Tensor,
    k: Tensor,
    masks: Sequence[Tensor | None],
    block_tokens: int,
    num_chosen: int,
    query_offset: int,
    query_start: Tensor | None,
) -> Tensor:
    """Return the blocks of every query, int32 [B, H, Nq, num_chosen]: chosen past blocks, its own, -1 for none.

    Blocks are numbered within the query's document. The score of a past block is the product of the query and the mean
    of the block's keys, in float32 or wider. Among scores that are equal up to rounding, the lowest block is chosen.
    There is no gradient.

    Args:
        q: queries [B, H, Nq, D], after rotary positions.
        k: keys [B, Hkv, Nk, D].
        masks: the tensors of a `TokenMask`.
        query_offset: position of the first query; `query_start`, int64 scalar, replaces it.
    """
    offset = query_offset if query_start is None else int(query_start)
    tokens = TokenMask(*masks)
    blocks = document_blocks(tokens, k.shape[2], block_tokens, q.device)
    means = means_from_start(k, block_tokens) if tokens.is_empty else block_means(k, blocks)
    rows = slice(offset, offset + q.shape[2])
    documents, positions = blocks.of_tokens.documents[:, rows], blocks.of_tokens.positions[:, rows]
    own = (positions // block_tokens).masked_fill(documents == NO_DOCUMENT, -1)
    return blocks_by_means(q, means, own, documents, blocks.numbers, blocks.documents, num_chosen)


def blocks_by_means(
    q: Tensor,
    means: Tensor,
    own: Tensor,
    documents: Tensor,
    block_numbers: Tensor,
    block_documents: Tensor,
    num_chosen: int,
) -> Tensor:
    """Return `choose_blocks` of queries by the means of blocks.

    Args:
        means: [B, Hkv, blocks, D], in float32 or wider.
        own, documents: the number of each query's block, -1 if it is masked, and its document, [batch or 1, queries].
        block_numbers, block_documents: the number of each block in its document, and its document, [batch or 1,
            blocks].
    """
    # broadcasts to [batch or 1, queries, blocks]
    own = own[..., None]
    chosen = q.new_full((*q.shape[:3], num_chosen), -1, dtype=torch.int32)
    chosen[..., -1:] = own[:, None]
    num_past = min(num_chosen - 1, means.shape[2])
    if num_past == 0:
        return chosen
    most = min(MAX_SCORES, CACHED_SCORES) if q.device.type == "cpu" else MAX_SCORES
    step = max(1, most // (q.shape[0] * q.shape[1] * means.shape[2]))
    for first in range(0, q.shape[2], step):
        some = slice(first, first + step)
        is_past = (block_numbers[:, None] < own[:, some]) & (block_documents[:, None] == documents[:, some, None])
        count = _num_reached(is_past, num_past)
        scores = _scores(q[:, :, some], means[:, :, :count])
        scores = scores.masked_fill_(~is_past[:, None, :, :count], -torch.inf)
        index, exists = first_highest(scores, num_past, tie_width(scores.dtype))
        numbers = block_numbers[:, None, None].expand(*index.shape[:3], -1).gather(3, index)
        chosen[:, :, some, :num_past] = numbers.masked_fill(~exists, -1).to(torch.int32)
    return chosen


def _num_reached(is_past: Tensor, fewest: int) -> int:
    """Return how many blocks from the start include all past blocks of some queries, at least `fewest`.

    On other devices than CPUs these are all blocks, so that the host does not wait.

    is_past: bool [batch or 1, queries, blocks].
    """
    if is_past.device.type != "cpu":
        return is_past.shape[2]
    reached = torch.nonzero(is_past.any(1).any(0))
    return max(fewest, int(reached[-1]) + 1) if reached.numel() else fewest


@choose_blocks.register_fake
def _block_shapes(q: Tensor, k: Tensor, masks: Any, block_tokens: int, num_chosen: int, *_: Any) -> Tensor:
    return q.new_empty((*q.shape[:3], num_chosen), dtype=torch.int32)


def document_blocks(tokens: TokenMask, num_keys: int, block_tokens: int, device: torch.device) -> DocumentBlocks:
    """Return the blocks of every example's documents."""

    if tokens.is_empty:
        index = torch.arange(num_keys, device=device)[None]
        numbers = torch.arange(max(1, -(-num_keys // block_tokens)), device=device)[None]
        locations = TokenLocations(torch.zeros_like(index), index)
        return DocumentBlocks(index // block_tokens, numbers, torch.zeros_like(numbers), locations)

    def build() -> DocumentBlocks:
        found = _document_blocks(locations_on_host(tokens, num_keys), block_tokens)
        of_tokens = [found.of_tokens.documents, found.of_tokens.positions]
        of_keys, numbers, blocks, *of_tokens = send((found.of_keys, found.numbers, found.documents, *of_tokens), device)
        return DocumentBlocks(of_keys, numbers, blocks, TokenLocations(*of_tokens))

    return _blocks.get_of(tokens.tensors, (num_keys, block_tokens, device), build)


def _document_blocks(locations: TokenLocations, block_tokens: int) -> DocumentBlocks:
    documents, numbers = locations.documents, locations.positions // block_tokens
    is_token = documents != NO_DOCUMENT
    # masked keys within a block do not end it: a block is identified by its document and number, which only grow
    size = int(numbers.max()) + 1 if numbers.numel() else 1
    ids = torch.where(is_token, documents * size + numbers, -1)
    latest = ids.cummax(1).values
    is_new = torch.cat([latest[:, :1] >= 0, latest[:, 1:] != latest[:, :-1]], 1)
    index = is_new.cumsum(1) - 1
    count = max(1, int(index.max()) + 1) if index.numel() else 1
    of_keys = torch.where(is_token, index, count)
    width = (documents.shape[0], count + 1)
    # the document and the number of each block, from its keys
    of_blocks = torch.full(width, -1).scatter_reduce(1, of_keys, ids, "amax")[:, :count]
    exists = of_blocks >= 0
    return DocumentBlocks(
        of_keys,
        torch.where(exists, of_blocks % size, -1),
        torch.where(exists, of_blocks // size, NO_DOCUMENT),
        locations,
    )


def block_means(k: Tensor, blocks: DocumentBlocks) -> Tensor:
    """Return the mean of the keys of each block, [B, Hkv, blocks, D], in float32 or wider."""
    wide = k.to(torch.promote_types(k.dtype, torch.float32))
    batch_size, num_heads, _, width = wide.shape
    count = blocks.numbers.shape[1]
    of_keys = blocks.of_keys.expand(batch_size, -1)
    sums = wide.new_zeros(batch_size, num_heads, count + 1, width)
    sums.scatter_add_(2, of_keys[:, None, :, None].expand_as(wide), wide)
    counts = wide.new_zeros(batch_size, count + 1).scatter_add_(1, of_keys, wide.new_ones(()).expand(of_keys.shape))
    return sums[:, :, :count] / counts[:, None, :count, None].clamp(min=1)


def means_from_start(k: Tensor, block_tokens: int) -> Tensor:
    """Return `block_means` for blocks that are counted from the first key, if no key is masked."""
    dtype, num_whole = torch.promote_types(k.dtype, torch.float32), k.shape[2] // block_tokens
    whole, rest = k.split([num_whole * block_tokens, k.shape[2] - num_whole * block_tokens], 2)
    means = whole.unflatten(2, (num_whole, block_tokens)).mean(3, dtype=dtype)
    return means if rest.shape[2] == 0 else torch.cat([means, rest.mean(2, keepdim=True, dtype=dtype)], 2)


def _scores(q: Tensor, means: Tensor) -> Tensor:
    """Return the product of each query with the mean of each block, [B, H, queries, blocks]."""
    grouped = q.to(means.dtype).unflatten(1, (means.shape[1], -1))
    with autocast_off(q.device.type):
        return (grouped @ means[:, :, None].transpose(-1, -2)).flatten(1, 2)


# Token top-k: the keys that every query attends to, selected by the scores of an indexer.
#
# DeepSeek-V3.2 (arXiv:2512.02556), equations 1 and 2.


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

    A query chooses among the keys of its document up to itself. Among scores that are equal up to rounding, the first
    key is chosen. There is no gradient. Memory is linear in the number of keys.

    Args:
        queries, keys, weights: those of the indexer, see `index_scores`; keys are [B, Nk, D].
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
        # the tie width ignores the rounding of narrow keys: keys contain positions, so equal tokens do not tie
        index, exists = first_highest(scores, count, tie_width(scores.dtype))
        chosen[:, 0, rows, :count] = index.masked_fill(~exists, -1).to(torch.int32)
    return chosen


@choose_tokens.register_fake
def _token_shapes(queries: Tensor, keys: Tensor, weights: Tensor, masks: Any, top_k: int, *_: Any) -> Tensor:
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
    """Return which keys belong to a query's document and do not come after it, bool [batch or 1, queries, keys].

    Args:
        documents: the document of each key, [batch or 1, keys].
        rows: the range of the call's queries.
    """
    slots = torch.arange(documents.shape[1], device=documents.device)
    queries = slots[query_offset + rows.start : query_offset + rows.stop]
    own = documents[:, queries, None]
    return (own != NO_DOCUMENT) & (documents[:, None] == own) & (slots <= queries[:, None])
