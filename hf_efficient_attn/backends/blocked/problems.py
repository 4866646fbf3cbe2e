"""A call cut into problems: one document, one run of heads that share a pattern, one BlockLayout."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_efficient_attn.layout.block_layout import BlockLayout
from hf_efficient_attn.layout.compile import compile_layout
from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.layout.token_mask import Document, TokenMask


@dataclass(frozen=True)
class Problem:
    """Where in the tensors of a call a part of it lies.

    Attributes:
        example: index in the batch.
        heads, key_heads: query heads and the key heads they read, as slices of equal length.
        queries, keys: rows of the query and key tensors, as slices.
        query_offset: position of the first of these queries in their document.
        hole_bias: [keys] of 0 and -inf; None: no key is masked.
        hole_rows: bool [queries], masked queries; None like the bias.
    """

    example: int
    heads: slice
    key_heads: slice
    queries: slice
    keys: slice
    query_offset: int
    blocks: BlockLayout
    hole_bias: Tensor | None = None
    hole_rows: Tensor | None = None

    def of_queries(self, tensor: Tensor) -> Tensor:
        """Return [heads, queries, ...] of a tensor [batch, heads, queries, ...], a view."""
        return tensor[self.example, self.heads, self.queries]

    def of_keys(self, tensor: Tensor) -> Tensor:
        """Return [heads, keys, ...] of a tensor [batch, key heads, keys, ...], a view."""
        return tensor[self.example, self.key_heads, self.keys]


def problems(
    layout: Layout, tokens: TokenMask, batch_size: int, num_key_heads: int, block_tokens: int, device: torch.device
) -> Iterator[Problem]:
    """Yield the problems of a call; together they hold every query that reads anything, once."""
    for example, documents in enumerate(tokens.documents(batch_size, layout.num_keys)):
        for document in documents:
            own = layout.of_document(document.start, document.stop, document.global_positions)
            if own.num_queries == 0:
                continue
            holes = hole_masks(tokens, example, document, own)
            first_query = document.start + own.query_offset - layout.query_offset
            queries = slice(first_query, first_query + own.num_queries)
            for first, count, pattern in own.head_groups():
                place = (own.num_queries, own.num_keys, own.query_offset)
                blocks = compile_layout(pattern, *place, block_tokens, device)
                for heads, key_heads in head_slices(first, count, layout.num_heads // num_key_heads):
                    yield Problem(
                        example,
                        heads,
                        key_heads,
                        queries,
                        slice(document.start, document.stop),
                        own.query_offset,
                        blocks,
                        *holes,
                    )


def head_slices(first: int, count: int, group: int) -> Iterator[tuple[slice, slice]]:
    """Yield slices of query heads and of the key heads they read, where `group` query heads share a key head.

    >>> list(head_slices(0, 4, 2))
    [(slice(0, 4, 2), slice(0, 2, None)), (slice(1, 4, 2), slice(0, 2, None))]
    """
    for start in range(first, first + min(count, group)):
        heads = slice(start, first + count, group)
        num_heads = len(range(start, first + count, group))
        yield heads, slice(start // group, start // group + num_heads)


def hole_masks(
    tokens: TokenMask, example: int, document: Document, own: Layout
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Return the bias of the masked keys within a document and its masked queries; None where no key is masked."""
    if not document.has_holes or tokens.key_mask is None:
        return None, None
    mask = tokens.key_mask[example, document.start : document.stop]
    bias = torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, float("-inf"))
    return bias, ~mask[own.query_offset : own.query_offset + own.num_queries]
