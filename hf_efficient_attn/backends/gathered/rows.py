"""Number the rows of a tensor [batch, heads, tokens, ...], so that any of them can be gathered or added to at once."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hf_efficient_attn.backends.kernels import wide
from hf_efficient_attn.layout.score_terms import Term
from hf_efficient_attn.layout.selected_keys import Tiles


@dataclass(frozen=True)
class Rows:
    """The rows of a tensor as a table, which is a view if the strides allow it.

    Attributes:
        table: [rows, width], or [rows] of a tensor without a width.
        steps: how far the numbers of neighbouring examples, heads and tokens are apart.
    """

    table: Tensor
    steps: tuple[int, int, int]

    def numbers(self, examples: Tensor, heads: Tensor, tokens: Tensor) -> Tensor:
        """Return the numbers of rows; empty places (-1) get the number of token 0."""
        return examples * self.steps[0] + heads * self.steps[1] + tokens.clamp(min=0) * self.steps[2]

    def take(self, numbers: Tensor) -> Tensor:
        """Return the rows, [*numbers.shape, width]."""
        return self.table.index_select(0, numbers.flatten()).unflatten(0, numbers.shape)

    def add(self, numbers: Tensor, values: Tensor) -> None:
        """Add values [*numbers.shape, width] to the rows."""
        flat = values.reshape(numbers.numel(), *self.table.shape[1:])
        self.table.index_add_(0, numbers.flatten(), flat.to(self.table.dtype))


def rows_of(tensor: Tensor) -> Rows:
    """Return the rows of a tensor [batch, heads, tokens, width] or [batch, heads, tokens], copied if necessary."""
    table = _view(tensor)
    if table is None:
        tensor = tensor.contiguous()
        table = _view(tensor)
    assert table is not None
    return table


def _view(tensor: Tensor) -> Rows | None:
    width = tensor.shape[3] if tensor.ndim == 4 else 1
    strides = tensor.stride()[:3]
    sizes = tensor.shape[:3]
    if tensor.ndim == 4 and tensor.stride(3) != 1 and width > 1:
        return None
    used = [stride for stride, size in zip(strides, sizes, strict=True) if size > 1]
    if any(stride % max(1, width) or stride < width for stride in used):
        return None
    steps = [stride // max(1, width) if size > 1 else 0 for stride, size in zip(strides, sizes, strict=True)]
    count = 1 + sum(step * (size - 1) for step, size in zip(steps, sizes, strict=True))
    shape, step = ((count, width), (width, 1)) if tensor.ndim == 4 else ((count,), (1,))
    return Rows(tensor.as_strided(shape, step), (steps[0], steps[1], steps[2]))


# Which rows of a call's tensors the queries and keys of tiles are.


Steps = tuple[int, int, int]


class TileRows:
    """The row numbers of the queries and keys of tiles, computed once for all tensors with equal steps."""

    def __init__(self, tiles: Tiles, num_keys: int) -> None:
        self.tiles, self.num_keys = tiles, num_keys
        self.numbers_of_queries: dict[Steps, Tensor] = {}
        self.numbers_of_keys: dict[Steps, Tensor] = {}

    def query_numbers(self, rows: Rows) -> Tensor:
        """Return the numbers of the rows of queries, [sets, tiles, queries]."""
        tiles, found = self.tiles, self.numbers_of_queries
        if rows.steps not in found:
            found[rows.steps] = rows.numbers(tiles.examples[:, None, None], tiles.heads, tiles.queries)
        return found[rows.steps]

    def key_numbers(self, rows: Rows) -> Tensor:
        """Return the numbers of the rows of keys, [sets, places]."""
        tiles, found = self.tiles, self.numbers_of_keys
        if rows.steps not in found:
            keys = tiles.keys.masked_fill(tiles.keys >= self.num_keys, -1)
            found[rows.steps] = rows.numbers(tiles.examples[:, None], tiles.key_heads[:, None], keys)
        return found[rows.steps]

    def of_queries(self, rows: Rows) -> Tensor:
        """Return the rows of queries, [sets, tiles, queries, ...]."""
        return rows.take(self.query_numbers(rows))

    def keys(self, rows: Rows) -> Tensor:
        """Return the rows of the keys of sets, [sets, places, width]."""
        return rows.take(self.key_numbers(rows))

    def of_keys(self, rows: Rows) -> Tensor:
        """Return the rows of the keys of each tile, overlapping views [sets, tiles, keys, width]."""
        return self.tiles.of_keys(self.keys(rows))


# The learned terms of tiles: looked up by label, and their gradients added up by label.


class TileTerm:
    """The part of one term that tiles use.

    Attributes:
        labels: the labels of pairs; broadcasts to [sets, tiles, queries, keys].
    """

    def __init__(self, term: Term, values: Rows, labels: Tensor, tiles: Tiles) -> None:
        self.term, self.values, self.labels = term, values, labels
        self.numbers = values.numbers(tiles.examples[:, None, None], tiles.heads, tiles.queries)
        # 1, or the number of labels
        self.num_values = values.table.shape[1]

    @cached_property
    def scores(self) -> Tensor:
        """What the term adds to the scores, [sets, tiles, queries, keys]."""
        is_single = self.num_values == 1
        values = self.values.take(self.numbers) if is_single else self.values.table.flatten()[self.entries]
        return self.term.label.score(values, self.labels)

    @cached_property
    def entries(self) -> Tensor:
        """The index of each pair's value among all values, [sets, tiles, queries, keys]."""
        return self.numbers[..., None] * self.num_values + self.labels.clamp(0, self.num_values - 1)

    def add_gradient(self, gradient: Rows, d_scores: Tensor) -> None:
        """Add the gradient of the tiles to the rows of `gradient`, which are numbered as those of the values."""
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
