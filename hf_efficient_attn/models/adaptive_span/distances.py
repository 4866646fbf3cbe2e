"""The authors' relative positions: one table of vectors, added to the keys, for all heads and layers."""

import torch
from torch import Tensor, nn
from transformers import initialization as init

from hf_efficient_attn.models.spans.freezing import fit_rows

from .configuration_adaptive_span import AdaptiveSpanConfig


class DistanceTable(nn.Module):
    """A vector per distance, [limit, head_dim], the nearest key first; starts as N(0, 1), as in the authors' code."""

    def __init__(self, config: AdaptiveSpanConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(config.span_limit, config.head_dim))

    def initialize(self) -> None:
        init.normal_(self.weight)

    def forward(self) -> Tensor:
        """Return the table."""
        return self.weight

    def set_distances(self, num_distances: int) -> None:
        """Change the number of distances; new ones are initialised as the others were."""
        self.weight = nn.Parameter(fit_rows(self.weight.data, num_distances))
