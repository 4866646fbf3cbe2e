"""Where the queries of a call stand on their axis, also while compiling, when a tensor says it and no number."""

import torch
from torch import Tensor

from hf_efficient_attn.layout.layout import Layout


def first_query(layout: Layout, query_start: Tensor | None) -> int | Tensor:
    """Return the position of the first query; query_start: integer scalar that replaces the layout's `query_offset`."""
    return layout.query_offset if query_start is None else query_start


def query_rows(layout: Layout, query_start: Tensor | None) -> slice | Tensor:
    """Return the positions of the queries, as an index into a dimension of tensors.

    >>> from hf_efficient_attn.patterns.bands import Causal
    >>> layout = Layout(Causal(), num_heads=1, num_queries=2, num_keys=8, query_offset=6)
    >>> query_rows(layout, None), query_rows(layout, torch.tensor(3))
    (slice(6, 8, None), tensor([3, 4]))
    """
    if query_start is None:
        return layout.queries
    return query_start + torch.arange(layout.num_queries, device=query_start.device)
