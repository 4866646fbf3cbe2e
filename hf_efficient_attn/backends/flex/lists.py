"""Lists of the blocks that a kernel computes: how many each row of blocks has, and which, as a BlockMask holds them."""

import torch
from torch import Tensor


def listed(is_listed: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many columns each row has, int32 [..., rows], and all columns, its own first, int32 [..., columns].

    is_listed: which columns a row has, bool [..., rows, columns].
    """
    numbers = is_listed.to(torch.int32)
    columns = torch.argsort(numbers, dim=-1, descending=True, stable=True)
    return numbers.sum(-1, dtype=torch.int32), columns.to(torch.int32).contiguous()


def are_listed(counts: Tensor, indices: Tensor) -> Tensor:
    """Return which columns each row lists, bool [..., rows, columns].

    Args:
        counts: how many columns each row lists, [..., rows].
        indices: their indices, which come first in their row, [..., rows, columns].
    """
    num_columns = indices.shape[-1]
    is_entry = torch.arange(num_columns, device=indices.device) < counts[..., None]
    # entries that are not listed go to an extra column
    places = indices.masked_fill(~is_entry, num_columns).long()
    found = torch.zeros(*indices.shape[:-1], num_columns + 1, dtype=torch.bool, device=indices.device)
    return found.scatter_(-1, places, True)[..., :num_columns]


def by_column(counts: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many rows list each column, [..., columns], and their indices, [..., columns, rows], before the rest.

    torch does the same by vmap, which cannot be called within an operator. The arguments are those of `are_listed`.
    """
    return listed(are_listed(counts, indices).transpose(-1, -2))
