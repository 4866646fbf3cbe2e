"""The learned terms of tiles: looked up by label, and their gradients added up by label."""

from functools import cached_property

import torch
from torch import Tensor

from hf_efficient_attn.backends.gathered.rows import Rows, rows_of
from hf_efficient_attn.backends.kernels import wide
from hf_efficient_attn.layout.chosen.tiles import Tiles
from hf_efficient_attn.layout.terms import Term


class TileTerm:
    """The part of one term that tiles read.

    Attributes:
        labels: of the pairs, broadcasts to [sets, tiles, queries, keys].
    """

    def __init__(self, term: Term, values: Rows, labels: Tensor, tiles: Tiles) -> None:
        self.term, self.values, self.labels = term, values, labels
        self.numbers = values.numbers(tiles.examples[:, None, None], tiles.heads, tiles.queries)
        # of equal places several values of one query, of which each has its own row
        self.num_values = values.table.shape[1]

    @cached_property
    def scores(self) -> Tensor:
        """What the term adds to the scores, [sets, tiles, queries, keys]."""
        is_single = self.num_values == 1
        values = self.values.take(self.numbers) if is_single else self.values.table.flatten()[self.entries]
        return self.term.label.score(values, self.labels)

    @cached_property
    def entries(self) -> Tensor:
        """Which number of all values each pair reads, [sets, tiles, queries, keys]."""
        return self.numbers[..., None] * self.num_values + self.labels.clamp(0, self.num_values - 1)

    def add_gradient(self, gradient: Rows, d_scores: Tensor) -> None:
        """Add the gradient of the tiles to the rows of `gradient`, which are as those of the values."""
        if self.num_values == 1:
            values = self.values.take(self.numbers)
            d_values = self.term.label.gradient(values, self.labels, d_scores)
            gradient.add(self.numbers, d_values.expand_as(d_scores).sum(-1, keepdim=True))
        else:
            gradient.table.view(-1).index_add_(0, self.entries.flatten(), d_scores.flatten())


def wide_rows(values: Tensor) -> Rows:
    """Return the rows of the values of a term, contiguous and in the dtype in which scores are computed."""
    return rows_of(wide(values).contiguous())


def gradient_rows(values: Tensor) -> tuple[Tensor, Rows]:
    """Return zeros of the shape of values, in the dtype of their gradient, and their rows."""
    zeros = torch.zeros_like(wide(values), memory_format=torch.contiguous_format)
    return zeros, rows_of(zeros)
