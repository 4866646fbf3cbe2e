"""Which groups hold one position."""

from torch import Tensor


def holding_groups(queries: Tensor, position: int) -> Tensor:
    """Return which groups [batch, heads, groups, places] hold a position: [batch, heads, n], others where fewer do.

    >>> import torch
    >>> holding_groups(torch.tensor([[[[0, 1], [2, 3], [3, 4]]]]), 3).sort().values.tolist()
    [[[1, 2]]]
    """
    holds = (queries == position).any(-1)
    return holds.int().topk(max(1, int(holds.sum(-1).max())) if holds.shape[2] else 0, -1).indices


def of_groups(places: Tensor, groups: Tensor) -> Tensor:
    """Return the places [batch or 1, heads or 1, groups, places] of some groups, [batch, heads, n]."""
    shape = (*groups.shape[:2], *places.shape[2:])
    return places.expand(shape).gather(2, groups[..., None].expand(*groups.shape, places.shape[3]))
