"""What the attention of every mechanism of this family has: maps of queries, keys, values and output."""

from typing import Any

import torch
from torch import Tensor, nn

from hf_efficient_attn.models.mechanisms.text_reading import TextReading
from hf_efficient_attn.models.mechanisms.texts import Texts


class MechanismAttention(TextReading):
    """Multi-head attention by a mechanism. [B, T, hidden_size] → the same, and the weights or None."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        width = config.hidden_size
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width, bias=config.attention_bias) for _ in range(3))
        self.o_proj = nn.Linear(width, width, bias=config.attention_output_bias)

    def forward(self, hidden_states: Tensor, texts: Texts, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Return the output and, with `output_attentions`, the weights [B, H, T, S] of what each token reads."""
        out, weights = self.read_texts(hidden_states, texts, **kwargs)
        return self.o_proj(out), weights

    def project(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        return self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)


def zeroed(states: Tensor, real: Tensor | None) -> Tensor:
    """Return states [R, L, X] with zeros behind the texts."""
    return states if real is None else torch.where(real.unsqueeze(-1), states, 0)
