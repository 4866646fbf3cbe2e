"""Block top-k: which blocks of keys every query reads, by its score with the means of the blocks.

Lu et al., "MoBA: Mixture of Block Attention" (arXiv:2502.13189), equations 3 to 6.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.layout.autocast import autocast_off
from hf_efficient_attn.layout.cache import SMALL_BYTES, BoundedCache
from hf_efficient_attn.layout.chosen.ranking import first_highest, tie_width
from hf_efficient_attn.layout.device_copies import send
from hf_efficient_attn.layout.token_locations import NO_DOCUMENT, TokenLocations, locations_on_host
from hf_efficient_attn.layout.token_mask import TokenMask

# scores of queries with blocks that are in memory at a time, and on CPUs, so few that they stay in a cache
MAX_SCORES, CACHED_SCORES = 1 << 22, 1 << 20


@dataclass(frozen=True, eq=False)
class DocumentBlocks:
    """The blocks of the documents of each example, in the order of their keys. Shapes: [batch or 1, ...].

    Attributes:
        of_keys: int [..., keys], the index of each key's block here; masked keys have one of their own, the last.
        numbers: int [..., blocks], the number of a block in its document; of those that do not exist, any.
        documents: int [..., blocks], the document of a block; NO_DOCUMENT: it does not exist.
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
    """Return the blocks that every query reads, int32 [B, H, Nq, num_chosen]: chosen past blocks, its own, -1 for none.

    Blocks are numbered within the query's document. A block of the past scores the product of the query with the mean
    of its keys, in float32 or wider; of scores that are equal but for rounding, the lowest block is chosen. No gradient
    passes.

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
    return chosen_by_means(q, means, own, documents, blocks.numbers, blocks.documents, num_chosen)


def chosen_by_means(
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
        block_numbers, block_documents: the number of each block in its document, and this, [batch or 1, blocks].
    """
    # and later [batch or 1, queries, blocks]
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
    """Return how many blocks, `fewest` at least, hold all those of the past of some queries; all off the CPU.

    is_past: bool [batch or 1, queries, blocks].
    """
    if is_past.device.type != "cpu":
        return is_past.shape[2]
    reached = torch.nonzero(is_past.any(1).any(0))
    return max(fewest, int(reached[-1]) + 1) if reached.numel() else fewest


@choose_blocks.register_fake
def _(q: Tensor, k: Tensor, masks: Any, block_tokens: int, num_chosen: int, *_: Any) -> Tensor:
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
    # masked keys within a block do not end it: a block is a document and a number, which only grow
    size = int(numbers.max()) + 1 if numbers.numel() else 1
    ids = torch.where(is_token, documents * size + numbers, -1)
    latest = ids.cummax(1).values
    is_new = torch.cat([latest[:, :1] >= 0, latest[:, 1:] != latest[:, :-1]], 1)
    index = is_new.cumsum(1) - 1
    count = max(1, int(index.max()) + 1) if index.numel() else 1
    of_keys = torch.where(is_token, index, count)
    width = (documents.shape[0], count + 1)
    # of each block, the number and the document that its keys have
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
    """Return the same for blocks that are counted from the first key, none of which is masked."""
    dtype, num_whole = torch.promote_types(k.dtype, torch.float32), k.shape[2] // block_tokens
    whole, rest = k.split([num_whole * block_tokens, k.shape[2] - num_whole * block_tokens], 2)
    means = whole.unflatten(2, (num_whole, block_tokens)).mean(3, dtype=dtype)
    return means if rest.shape[2] == 0 else torch.cat([means, rest.mean(2, keepdim=True, dtype=dtype)], 2)


def _scores(q: Tensor, means: Tensor) -> Tensor:
    """Return the product of each query with the mean of each block, [B, H, queries, blocks]."""
    grouped = q.to(means.dtype).unflatten(1, (means.shape[1], -1))
    with autocast_off(q.device.type):
        return (grouped @ means[:, :, None].transpose(-1, -2)).flatten(1, 2)
