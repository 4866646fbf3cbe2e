"""Where the tokens of a call stand in their documents, read from its token table."""

import torch
from torch import Tensor

from hf_efficient_attn.attention.table_form import is_table
from hf_efficient_attn.attention.token_table import TokenColumns, read_table
from hf_efficient_attn.layout.host_copies import bring, on_host
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.layout.token_tables import NO_DOCUMENT, TokenTables, token_tables


def document_tables(
    attention_mask: Tensor | None, batch_size: int, num_queries: int, num_keys: int, device: torch.device
) -> tuple[TokenColumns, TokenTables]:
    """Return what a token table says about the keys; a matrix, or None, says that each row is one whole document."""
    columns = TokenColumns()
    if attention_mask is not None and is_table(attention_mask):
        columns = read_table(attention_mask, batch_size, num_queries, num_keys)
    return columns, token_tables(TokenMask(columns.key_mask, columns.segment_ids), num_keys, device)


def tables_on_host(columns: TokenColumns, num_keys: int) -> TokenTables:
    """Return the same tables on the host, where they can be asked."""
    masks = (columns.key_mask, columns.segment_ids)
    bring(*masks)
    tokens = TokenMask(*(None if mask is None else on_host(mask) for mask in masks))
    return token_tables(tokens, num_keys, torch.device("cpu"))


def last_positions(tables: TokenTables) -> Tensor:
    """Return the last position of each token's document, int [batch, keys]; 0 where a token is masked.

    >>> key_mask, segment_ids = torch.tensor([[1, 1, 1, 1, 0]]).bool(), torch.tensor([[7, 7, 7, 8, 8]])
    >>> last_positions(token_tables(TokenMask(key_mask, segment_ids), 5, torch.device("cpu"))).tolist()
    [[2, 2, 2, 0, 0]]
    """
    is_masked = tables.documents == NO_DOCUMENT
    documents, positions = tables.documents.clamp(min=0), tables.positions.masked_fill(is_masked, 0)
    last = torch.zeros_like(positions).scatter_reduce(1, documents, positions, "amax")
    return last.gather(1, documents).masked_fill(is_masked, 0)
