"""The block of a sparse Transformer: attention and MLP, each with a skip and a norm after it (BERT) or before it."""

from typing import Any

from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_efficient_attn.models.parts.blocks import MLP, build_norm, finite
from hf_efficient_attn.models.sparse.attention import SparseAttention


class SparseLayer(GradientCheckpointingLayer):
    """One block. Shapes: [B, T, hidden_size] → the same.

    Post-norm: x ← N(x + f(x)), as Vaswani et al. (arXiv:1706.03762), BERT and RoBERTa. Pre-norm: x ← x + f(N(x)).

    attention: of another kind, which returns its output first; None: that of the layer's pattern.
    """

    def __init__(self, config: Any, layer_idx: int, is_gated: bool = False, attention: nn.Module | None = None) -> None:
        super().__init__()
        self.is_pre_norm = config.norm_position == "pre"
        self.self_attn = SparseAttention(config, layer_idx) if attention is None else attention
        has_first_norm = not self.is_pre_norm or layer_idx > 0 or config.norm_before_first_layer
        self.attention_norm = build_norm(config) if has_first_norm else nn.Identity()
        self.mlp = MLP(config, is_gated)
        self.mlp_norm = build_norm(config)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        normed = self.attention_norm(hidden_states) if self.is_pre_norm else hidden_states
        attended, _ = self.self_attn(normed, **kwargs)
        hidden_states = hidden_states + self.dropout(attended)
        if self.is_pre_norm:
            return finite(hidden_states + self.dropout(self.mlp(self.mlp_norm(hidden_states))))
        hidden_states = self.attention_norm(hidden_states)
        return finite(self.mlp_norm(hidden_states + self.dropout(self.mlp(hidden_states))))
