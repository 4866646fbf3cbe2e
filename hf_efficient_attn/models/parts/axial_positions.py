"""Axial positions: a table per axis instead of one row per position (arXiv:2001.04451, appendix; Ho et al., 2019)."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init


class AxialPositions(nn.Module):
    """Return the vectors of positions, the vectors of their coordinates side by side.

    Position p of a shape (n₁, n₂) has the coordinates (p div n₂, p mod n₂), and so on for more axes. A text may have
    any length up to n₁·n₂. Shapes: positions [B or 1, T] → [B or 1, T, hidden_size].

    Reads from the config: `axial_shape`, `axial_widths`, `axial_norm_std`.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.shape, self.std = config.axial_shape, config.axial_norm_std
        # parameters of this module and of no list, which transformers would not start
        for number, (size, width) in enumerate(zip(self.shape, config.axial_widths, strict=True)):
            self.register_parameter(f"axis_{number}", nn.Parameter(torch.empty(size, width)))

    @property
    def axes(self) -> list[nn.Parameter]:
        """The tables of the axes."""
        return [getattr(self, f"axis_{number}") for number in range(len(self.shape))]

    @property
    def num_embeddings(self) -> int:
        """The number of positions that the axes have together."""
        return torch.Size(self.shape).numel()

    def initialize(self) -> None:
        """Start as N(0, axial_norm_std²)."""
        for axis in self.axes:
            init.normal_(axis, std=self.std)

    def forward(self, position_ids: Tensor) -> Tensor:
        found, axes = [], self.axes
        for number in range(len(self.shape) - 1, -1, -1):
            # not on the first axis, so that a position beyond the end is an error and no other position
            coordinates = position_ids % self.shape[number] if number else position_ids
            found.append(nn.functional.embedding(coordinates, axes[number]))
            position_ids = position_ids // self.shape[number]
        return torch.cat(found[::-1], -1)
