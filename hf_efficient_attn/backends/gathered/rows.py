"""The rows of a tensor [batch, heads, tokens, ...] by numbers, so that any of them are gathered or added to at once."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """The rows of a tensor as a table; where its strides allow it, a view.

    Attributes:
        table: [rows, width], or [rows] of a tensor without a width.
        steps: between the rows of neighbouring examples, heads and tokens.
    """

    table: Tensor
    steps: tuple[int, int, int]

    def numbers(self, examples: Tensor, heads: Tensor, tokens: Tensor) -> Tensor:
        """Return the numbers of rows; empty places (-1) get that of another token."""
        return examples * self.steps[0] + heads * self.steps[1] + tokens.clamp(min=0) * self.steps[2]

    def take(self, numbers: Tensor) -> Tensor:
        """Return the rows, [*numbers.shape, width]."""
        return self.table.index_select(0, numbers.flatten()).unflatten(0, numbers.shape)

    def add(self, numbers: Tensor, values: Tensor) -> None:
        """Add values [*numbers.shape, width] to the rows."""
        flat = values.reshape(numbers.numel(), *self.table.shape[1:])
        self.table.index_add_(0, numbers.flatten(), flat.to(self.table.dtype))


def rows_of(tensor: Tensor) -> Rows:
    """Return the rows of a tensor [batch, heads, tokens, width] or [batch, heads, tokens], by a copy if need be."""
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
