"""A call divided into regions: one document, one share of its block layout, heads that are computed together."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_efficient_attn.layout.blocks.block_costs import BlockCosts
from hf_efficient_attn.layout.blocks.compile import compile_layout
from hf_efficient_attn.layout.blocks.layout import CompiledShare
from hf_efficient_attn.layout.call import AttentionCall
from hf_efficient_attn.layout.token_mask import NO_MASK, Document, TokenMask


@dataclass(frozen=True)
class Region:
    """Where one part of a call lies in its tensors.

    Attributes:
        example: index in the batch.
        heads, key_heads: query heads and the key heads that they read, as slices of equal length.
        queries, keys: rows of the query and key tensors, as slices.
        query_offset: position of the first of these queries in their document.
        hole_bias: [keys] of 0 and -inf; None: no key is masked.
    """

    example: int
    heads: slice
    key_heads: slice
    queries: slice
    keys: slice
    query_offset: int
    share: CompiledShare
    hole_bias: Tensor | None = None

    def take(self, of_queries: Sequence[Tensor], of_keys: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return [heads, queries, ...] of tensors [batch, heads, queries, ...], and the same of keys, in their order.

        Those in the order of a range are views.
        """
        found, share = [], self.share
        axes = ((of_queries, self.heads, self.queries, share.queries), (of_keys, self.key_heads, self.keys, share.keys))
        for tensors, heads, rows, order in axes:
            places = slice(order.start, order.stop, order.step) if isinstance(order, range) else order
            found.append([tensor[self.example, heads, rows][:, places] for tensor in tensors])
        return found[0], found[1]

    def put_back(
        self, of_queries: Sequence[Tensor], queries: Sequence[Tensor], of_keys: Sequence[Tensor], keys: Sequence[Tensor]
    ) -> None:
        """Write what `take` has taken back into the tensors; views need no writing."""
        if not isinstance(self.share.queries, range):
            for tensor, part in zip(of_queries, queries, strict=True):
                tensor[self.example, self.heads, self.queries].index_copy_(1, self.share.queries, part)
        if not isinstance(self.share.keys, range):
            for tensor, part in zip(of_keys, keys, strict=True):
                tensor[self.example, self.key_heads, self.keys].index_copy_(1, self.share.keys, part)


def regions(call: AttentionCall, q: Tensor, k: Tensor, costs: BlockCosts) -> Iterator[Region]:
    """Yield the regions of a call; together they hold every allowed pair once.

    q may have a multiple of the layout's heads, into which examples are folded, if all examples are alike.
    """
    layout, tokens, group = call.layout, call.tokens, q.shape[1] // k.shape[1]
    num_folded = q.shape[1] // layout.num_heads
    if tokens is NO_MASK:
        shares, rows = compile_layout(layout, costs, q.device).shares, (slice(0, layout.num_queries), slice(None))
        for example in range(q.shape[0]):
            for share in shares:
                for heads, key_heads in head_slices(share.first_head, num_folded * share.num_heads, group):
                    yield Region(example, heads, key_heads, *rows, layout.query_offset, share)
        return
    for example, documents in enumerate(tokens.documents(q.shape[0], layout.num_keys, layout.num_positions)):
        for document in documents:
            own = layout.of_document(document)
            if own.num_queries == 0:
                continue
            first_query = document.query_start + own.query_offset - layout.query_offset
            queries = slice(first_query, first_query + own.num_queries)
            keys = slice(document.start, document.stop)
            holes = hole_bias(tokens, example, document)
            for share in compile_layout(own, costs, q.device).shares:
                for heads, key_heads in head_slices(share.first_head, num_folded * share.num_heads, group):
                    yield Region(example, heads, key_heads, queries, keys, own.query_offset, share, holes)


def blank_rows(call: AttentionCall, costs: BlockCosts, device: torch.device) -> Iterator[tuple[slice, slice]]:
    """Yield heads and queries to which no run is the first to write, in any example."""
    if not call.tokens.is_empty:
        # documents may leave out queries
        yield slice(None), slice(None)
        return
    for blank in compile_layout(call.layout, costs, device).blanks:
        # of all heads, to which examples may be folded
        is_all = blank.num_heads == call.layout.num_heads
        heads = slice(None) if is_all else slice(blank.first_head, blank.first_head + blank.num_heads)
        yield heads, slice(blank.first_query, blank.first_query + blank.num_queries)


def shares_queries(call: AttentionCall) -> bool:
    """Return whether a query may be in several regions of other keys: documents of another axis may repeat."""
    return call.layout.is_cross and not call.tokens.is_empty


def head_slices(first: int, count: int, group: int) -> Iterator[tuple[slice, slice]]:
    """Yield slices of query heads and of the key heads they read, where `group` query heads share a key head.

    >>> list(head_slices(0, 4, 2))
    [(slice(0, 4, 2), slice(0, 2, None)), (slice(1, 4, 2), slice(0, 2, None))]
    """
    for start in range(first, first + min(count, group)):
        heads = slice(start, first + count, group)
        num_heads = len(range(start, first + count, group))
        yield heads, slice(start // group, start // group + num_heads)


def hole_bias(tokens: TokenMask, example: int, document: Document) -> Tensor | None:
    """Return the bias of the masked keys within a document, [keys] of 0 and -inf; None where no key is masked."""
    if not document.has_holes or tokens.key_mask is None:
        return None
    mask = tokens.key_mask[example, document.start : document.stop]
    return torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, float("-inf"))
