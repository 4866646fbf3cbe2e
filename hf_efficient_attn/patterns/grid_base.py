"""What grids have in common, whether or not all of their sizes are known."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from hf_efficient_attn.patterns.bounds import GlobalPosition
from hf_efficient_attn.patterns.grid_axes import check_grid
from hf_efficient_attn.patterns.pattern import Pattern


@dataclass(frozen=True)
class AnyGrid(Pattern):
    """A pattern for each axis of a grid of tokens, and tokens before it; `Grid` says what the fields mean."""

    # whether the first size may be None, for as many rows as a text has
    may_follow: ClassVar[bool]

    shape: Sequence[int | None]
    axes: Sequence[Pattern]
    prefix_tokens: int = 0
    borders: str = "cut"
    is_causal: bool = False

    def __post_init__(self) -> None:
        shape, axes = check_grid(self, self.may_follow)
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "axes", axes)

    @property
    def parts(self) -> tuple[Pattern, ...]:
        return tuple(self.axes)

    def with_parts(self, parts: tuple[Pattern, ...]) -> Pattern:
        return replace(self, axes=parts)

    def causal(self) -> Pattern:
        return replace(self, is_causal=True)

    def global_positions(self) -> tuple[GlobalPosition, ...]:
        """Return none: those of its axes are coordinates."""
        return ()

    def grid_shapes(self) -> tuple[tuple[int | None, ...], ...]:
        """Return its own: the axes of a grid that is an axis are coordinates."""
        return (tuple(self.shape),)

    @property
    def granularity(self) -> int:
        return 1


def written_shape(shape: Sequence[int | None]) -> str:
    """Return the shape of a grid as messages show it.

    >>> written_shape([None, 28])
    'any number × 28'
    """
    return " × ".join("any number" if size is None else str(size) for size in shape)
