"""The location of every token of a batch: its document and its position there, found without leaving the device."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.layout.onnx import is_written
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.layout.transfer import on_host, prefetch_to_host

# the document of a masked token
NO_DOCUMENT = -1


@dataclass(frozen=True)
class TokenLocations:
    """The location of every token, as tensors [batch, keys], or [1, keys] if all examples are alike.

    Attributes:
        documents: the index of a token's document in its example; NO_DOCUMENT if the token is masked.
        positions: the position in the document, counted from its first token.
        is_global: True for a chosen global token; None if there are none.
    """

    documents: Tensor
    positions: Tensor
    is_global: Tensor | None = None

    def in_order(self, order: Tensor) -> "TokenLocations":
        """Return the locations of the tokens at the positions `order`, int [tokens]."""
        is_global = None if self.is_global is None else self.is_global[:, order]
        return TokenLocations(self.documents[:, order], self.positions[:, order], is_global)


def token_locations(tokens: TokenMask, num_keys: int, device: torch.device) -> TokenLocations:
    """Return the document and the position of every token.

    >>> padded = TokenMask(key_mask=torch.tensor([[False, True, True, False]]))
    >>> locations = token_locations(padded, 4, torch.device("cpu"))
    >>> locations.documents.tolist(), locations.positions.tolist()
    ([[-1, 0, 0, -1]], [[0, 0, 1, 2]])
    """
    index = torch.arange(num_keys, device=device)
    masks = [mask for mask in (tokens.key_mask, tokens.segment_ids, tokens.global_mask) if mask is not None]
    batch_size = masks[0].shape[0] if masks else 1
    segments = torch.zeros(batch_size, num_keys, dtype=torch.long, device=device)
    if tokens.segment_ids is not None:
        segments[:, 1:] = (tokens.segment_ids[:, 1:] != tokens.segment_ids[:, :-1]).to(device).cumsum(1)
    key_mask = torch.ones_like(segments, dtype=torch.bool) if tokens.key_mask is None else tokens.key_mask.to(device)
    candidates = torch.where(key_mask, index, num_keys)
    starts = torch.full_like(segments, num_keys).scatter_reduce(1, segments, candidates, "amin")
    # a masked token before the first of its document has no position; it is never used
    positions = (index - starts.gather(1, segments)).clamp(min=0)
    is_global = None if tokens.global_mask is None else tokens.global_mask.to(device) & key_mask
    return TokenLocations(segments.masked_fill(~key_mask, NO_DOCUMENT), positions, is_global)


def axis_locations(layout: Layout, tokens: TokenMask, device: torch.device) -> tuple[TokenLocations, TokenLocations]:
    """Return the locations on the axis of the queries and on that of the keys, which may be the same axis.

    A query may attend to the keys of the document with its own number.
    """
    of_keys = token_locations(tokens, layout.num_keys, device)
    if layout.num_positions is None:
        return of_keys, of_keys
    # the masks cover the whole axis, even if the queries are only part of it
    sizes = [mask.shape[1] for mask in tokens.of_queries.tensors if mask is not None]
    of_queries = token_locations(tokens.of_queries, max([layout.num_positions, *sizes]), device)
    batch_size = max(of_queries.documents.shape[0], of_keys.documents.shape[0])
    ids: Sequence[Tensor | int] = (0, 0)
    if tokens.query_segment_ids is not None and tokens.segment_ids is not None:
        ids = _ranks(tokens.query_segment_ids.to(device), tokens.segment_ids.to(device))
    return _numbered(of_queries, ids[0], batch_size), _numbered(of_keys, ids[1], batch_size)


def _ranks(*ids: Tensor) -> list[Tensor]:
    """Return a number of at least 0 for each id: how many ids of all the tensors are smaller.

    Ids may be any integers, such as hashes, whose differences may overflow. The host does not wait for the device.
    """
    listed = torch.cat([each.long().flatten() for each in ids])
    # ONNX has no searchsorted
    counted = (listed[None] < listed[:, None]).sum(1) if is_written() else None
    ranks = torch.searchsorted(listed.sort().values, listed) if counted is None else counted
    parts = ranks.split([each.numel() for each in ids])
    return [part.view(each.shape) for part, each in zip(parts, ids, strict=True)]


def _numbered(locations: TokenLocations, ids: Tensor | int, batch_size: int) -> TokenLocations:
    """Return the locations of every example, with the ranks of the segment ids as the numbers of the documents."""
    documents = torch.where(locations.documents == NO_DOCUMENT, NO_DOCUMENT, ids)
    return TokenLocations(documents.expand(batch_size, -1), locations.positions.expand(batch_size, -1))


def locations_on_host(tokens: TokenMask, num_keys: int) -> TokenLocations:
    """Return the locations on the axis of the keys as tensors on the host."""
    prefetch_to_host(*tokens.tensors)
    known = TokenMask(*(None if mask is None else on_host(mask) for mask in tokens.tensors))
    return token_locations(known, num_keys, torch.device("cpu"))


def last_positions(locations: TokenLocations) -> Tensor:
    """Return the last position of each token's document, int [batch, keys]; 0 for masked tokens.

    >>> key_mask, segment_ids = torch.tensor([[1, 1, 1, 1, 0]]).bool(), torch.tensor([[7, 7, 7, 8, 8]])
    >>> last_positions(token_locations(TokenMask(key_mask, segment_ids), 5, torch.device("cpu"))).tolist()
    [[2, 2, 2, 0, 0]]
    """
    is_masked = locations.documents == NO_DOCUMENT
    documents, positions = locations.documents.clamp(min=0), locations.positions.masked_fill(is_masked, 0)
    last = torch.zeros_like(positions).scatter_reduce(1, documents, positions, "amax")
    return last.gather(1, documents).masked_fill(is_masked, 0)
