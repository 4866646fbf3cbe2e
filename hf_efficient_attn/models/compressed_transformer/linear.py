"""Linear attention of layers with maps of their own; what it computes, `LinearReading` says."""

from typing import Any

from torch import nn

from hf_efficient_attn.models.mechanisms.linear_reading import LinearReading

from .mechanism import MechanismAttention


class LinearAttention(MechanismAttention, LinearReading):
    """Attention by sums over keys, bidirectional or causal. [B, T, hidden_size] → the same, and the weights or None."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        if config.feature_map == "constant":
            self.q_proj = self.k_proj = nn.Identity()
