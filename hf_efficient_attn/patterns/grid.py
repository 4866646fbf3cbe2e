"""Grids: images, videos and tables, whose tokens read along every axis by a pattern of its own.

Ho et al., Axial Attention in Multidimensional Transformers (2019); Hassani et al., Neighborhood Attention Transformer
(2023).
"""

from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

from hf_efficient_attn.errors import InputError
from hf_efficient_attn.patterns.checks import MAX_INTEGER, check_length
from hf_efficient_attn.patterns.grid_axes import SHIFTED
from hf_efficient_attn.patterns.grid_base import AnyGrid, written_shape
from hf_efficient_attn.patterns.pattern import Pattern
from hf_efficient_attn.patterns.sized_grid import SizedGrid


@dataclass(frozen=True)
class Grid(AnyGrid, kind="grid"):
    """A token of a grid reads another if every axis' pattern lets its coordinate read the other's.

    The tokens of the grid follow `prefix_tokens` others, and the last coordinate runs fastest: images row by row,
    videos frame by frame. Inputs are checked by how many tokens they have. Their shape is known to models of
    transformers alone, which refuse 14 × 56 patches for a grid of 28 × 28, and patches of which a masked autoencoder
    leaves some out; `attention` knows nothing of either. Neighbourhoods are a band on every axis. Axial attention is
    `Full()` on one axis and `Band(0, 0)`, which leaves nothing but the token's own coordinate, on the others.

    shape: how many tokens lie along each axis; the first may be None, for as many rows or frames as there are.
    axes: a pattern for each axis, whose positions are coordinates on it.
    prefix_tokens: tokens before the grid (a class token, registers), which read everything and which everything reads.
    borders: "cut" leaves out what lies outside; "shifted" moves what is read inwards instead, so that all tokens read
        equally many keys (NATTEN).
    is_causal: no key after its query, row by row; the input may then end before the grid does.

    >>> from hf_efficient_attn.patterns.bands import Band
    >>> print(Grid([2, 3], [Band(1, 1), Band(0, 1)]).draw(6))
    ■■⬚■■⬚
    ⬚■■⬚■■
    ⬚⬚■⬚⬚■
    ■■⬚■■⬚
    ⬚■■⬚■■
    ⬚⬚■⬚⬚■

    Raises:
        ConfigurationError: axes without a size or a pattern, a pattern whose keys are no coordinates, or one that
            cannot be shifted.
    """

    may_follow: ClassVar[bool] = True

    @property
    def depends_on_length(self) -> bool:
        if not self.is_causal or super().depends_on_length:
            # the grid has to fit each input
            return True
        return self.shape[0] is None and self.borders == SHIFTED

    def resolve(self, num_keys: int, layer: int = 0, head: int = 0, num_heads: int = 1) -> Pattern:
        """Return the grid of an input.

        Raises:
            InputError: the input has more or fewer tokens than the grid.
        """
        check_length("num_keys", num_keys)
        return self._sized(self._shape_of(num_keys)).resolve(num_keys, layer, head, num_heads)

    def allowed(self, query: Any, key: Any) -> Any:
        if self.depends_on_length:
            self._needs_length()
        # what a causal token reads does not depend on how many rows follow
        rows = self.shape[0] or (MAX_INTEGER - self.prefix_tokens) // prod(self._inner_shape)
        return self._sized((rows, *self._inner_shape)).allowed(query, key)

    @property
    def _inner_shape(self) -> tuple[int, ...]:
        """The sizes of all axes but the first."""
        return tuple(size for size in self.shape[1:] if size is not None)

    def fitting_length(self, num_tokens: int) -> int:
        """Return how many tokens the grid has, of about as many rows as would fit."""
        row_tokens = prod(self._inner_shape)
        num_rows = self.shape[0] or max(1, (num_tokens - self.prefix_tokens) // row_tokens)
        num_all = self.prefix_tokens + num_rows * row_tokens
        return min(num_tokens, num_all) if self.is_causal else num_all

    def _sized(self, shape: tuple[int, ...]) -> SizedGrid:
        return SizedGrid(shape, self.axes, self.prefix_tokens, self.borders, self.is_causal)

    def _shape_of(self, num_tokens: int) -> tuple[int, ...]:
        """Return the sizes of the axes for an input of this length, or refuse it."""
        row_tokens, num_own = prod(self._inner_shape), num_tokens - self.prefix_tokens
        num_rows = self.shape[0] or max(1, -(-num_own // row_tokens))
        num_grid = num_rows * row_tokens
        if num_own == num_grid or (self.is_causal and num_own < num_grid):
            return (num_rows, *self._inner_shape)
        needed = (
            f"{self.prefix_tokens} + a multiple of {row_tokens}"
            if self.shape[0] is None
            else self.prefix_tokens + num_grid
        )
        raise InputError(
            f"{self.kind}: the input has {num_tokens} tokens, but {self.prefix_tokens} prefix tokens and a grid of "
            f"{written_shape(self.shape)} are {'at most ' if self.is_causal else ''}{needed}. Give inputs of this size "
            "(of images, the grid counts patches; masked tokens at either end do not count), or give the grid another "
            "shape or another number of prefix_tokens."
        )
