"""Where the tokens of a call stand in their documents, read from its token table."""

import torch
from torch import Tensor

from hf_efficient_attn.attention.table_form import is_table
from hf_efficient_attn.attention.token_table import TokenColumns, read_table
from hf_efficient_attn.layout.host_copies import bring, on_host
from hf_efficient_attn.layout.token_locations import NO_DOCUMENT, TokenLocations, token_locations
from hf_efficient_attn.layout.token_mask import TokenMask


def read_locations(
    attention_mask: Tensor | None, batch_size: int, num_queries: int, num_keys: int, device: torch.device
) -> tuple[TokenColumns, TokenLocations]:
    """Return what a token table says about the keys; a matrix, or None, says that each row is one whole document."""
    columns = TokenColumns()
    if attention_mask is not None and is_table(attention_mask):
        columns = read_table(attention_mask, batch_size, num_queries, num_keys)
    return columns, token_locations(TokenMask(columns.key_mask, columns.segment_ids), num_keys, device)


def locations_on_host(columns: TokenColumns, num_keys: int) -> TokenLocations:
    """Return the same locations on the host, where they can be read without waiting."""
    masks = (columns.key_mask, columns.segment_ids)
    bring(*masks)
    tokens = TokenMask(*(None if mask is None else on_host(mask) for mask in masks))
    return token_locations(tokens, num_keys, torch.device("cpu"))


def last_positions(locations: TokenLocations) -> Tensor:
    """Return the last position of each token's document, int [batch, keys]; 0 where a token is masked.

    >>> key_mask, segment_ids = torch.tensor([[1, 1, 1, 1, 0]]).bool(), torch.tensor([[7, 7, 7, 8, 8]])
    >>> last_positions(token_locations(TokenMask(key_mask, segment_ids), 5, torch.device("cpu"))).tolist()
    [[2, 2, 2, 0, 0]]
    """
    is_masked = locations.documents == NO_DOCUMENT
    documents, positions = locations.documents.clamp(min=0), locations.positions.masked_fill(is_masked, 0)
    last = torch.zeros_like(positions).scatter_reduce(1, documents, positions, "amax")
    return last.gather(1, documents).masked_fill(is_masked, 0)
