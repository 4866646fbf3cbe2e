"""Relative labels of ETC: the number of a pair, by which it looks up its vector and its bias.

The order is that of the authors' tables: with k the largest distance, 0 for the token itself, 1 … k for tokens to the
right of the query, k + 1 … 2k for tokens to the left, and then the three kinds of pairs with a global token. Distances
beyond k share the last label of their side. Source: Ainslie et al. (arXiv:2004.08483), section 3; the authors' code.
"""

import torch
from torch import Tensor

# rows of a table behind those of the distances: a token and a global token that is not, or is, of its own part of the
# text; two global tokens of different parts of it
NOT_LINKED, LINKED, OTHER_CONTEXT = 1, 2, 3
NUM_KINDS = 3


def num_labels(max_distance: int) -> int:
    """Return how many labels there are: 2k + 1 distances, and three kinds of pairs with a global token."""
    return 2 * max_distance + 1 + NUM_KINDS


def labels_of_offsets(offsets: Tensor, max_distance: int) -> Tensor:
    """Return the labels of offsets key − query.

    >>> labels_of_offsets(torch.arange(-5, 6), 3).tolist()
    [6, 6, 6, 5, 4, 0, 1, 2, 3, 3, 3]
    """
    near = offsets.abs().clamp(max=max_distance)
    return torch.where(offsets < 0, max_distance + near, near)


def labels_by_distance(max_distance: int) -> list[int]:
    """Return the labels in the order of `Distance(-k, k)`, which counts query − key from −k to k.

    >>> labels_by_distance(2)
    [2, 1, 0, 3, 4]
    """
    return [*range(max_distance, -1, -1), *range(max_distance + 1, 2 * max_distance + 1)]
