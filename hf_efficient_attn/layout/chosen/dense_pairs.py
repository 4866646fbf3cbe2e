"""Chosen keys as pairs: which are read, and how often each counts. It takes memory for all pairs."""

import torch
from torch import Tensor

from hf_efficient_attn.layout.chosen.chosen_keys import ChosenKeys, of_heads
from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.layout.query_rows import first_query
from hf_efficient_attn.layout.token_mask import TokenMask


def chosen_pairs(
    chosen: ChosenKeys,
    allowed: Tensor | None,
    layout: Layout,
    tokens: TokenMask,
    num_key_heads: int,
    query_start: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return which pairs are read, bool, and how often each counts, int32 of at least 1.

    Args:
        allowed: which pairs the pattern and the masks allow, bool [batch or 1, heads or 1, queries, keys]; None: all.
        query_start: as for `allowed_pairs`.
    """
    counts = of_heads(chosen.counts(layout, tokens, num_key_heads, query_start), layout.num_heads)
    read = counts > 0 if allowed is None else allowed & (counts > 0)
    if chosen.reads_self_last:
        read = with_self_last(read, first_query(layout, query_start))
    return read, counts.clamp(min=1)


def num_counted(chosen: ChosenKeys | None, layout: Layout) -> int:
    """Return how many pairs of one example are counted to know which a choice reads; 0 without a choice."""
    if chosen is None:
        return 0
    num_heads = 1 if chosen.num_choosing_heads == 1 else layout.num_heads
    return num_heads * layout.num_queries * layout.num_keys


def with_self_last(read: Tensor, query_offset: int | Tensor) -> Tensor:
    """Return the pairs [..., queries, keys] without those of a token with itself, where a query reads another key."""
    num_queries, num_keys = read.shape[-2:]
    queries = query_offset + torch.arange(num_queries, device=read.device)
    is_self = torch.arange(num_keys, device=read.device) == queries[:, None]
    reads_others = (read & ~is_self).any(-1, keepdim=True)
    return read & ~(is_self & reads_others)
