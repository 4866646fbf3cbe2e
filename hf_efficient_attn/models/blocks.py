"""The parts of a Transformer that no paper here changes: norms, MLPs, positions, and plain softmax attention.

Shapes: B batch, T tokens, D head size, H heads, Q query tokens, K key tokens.
"""

import math
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import repeat_kv

NORMS: dict[str, type[nn.Module]] = {"rmsnorm": nn.RMSNorm, "layernorm": nn.LayerNorm}


class MLP(nn.Module):
    """Return W_down·act(W_up·x), or W_down·(act(W_gate·x) * W_up·x) if gated. Shapes: [B, T, hidden] → the same.

    Reads from the config: `hidden_size`, `intermediate_size`, `hidden_act`, `leaky_relu_slope`, `gated_mlp`, `mlp_bias`.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(hidden, inner, bias=bias) if config.gated_mlp else None
        self.up_proj = nn.Linear(hidden, inner, bias=bias)
        self.down_proj = nn.Linear(inner, hidden, bias=bias)
        is_leaky = config.hidden_act == "leaky_relu"
        self.act_fn = nn.LeakyReLU(config.leaky_relu_slope) if is_leaky else ACT2FN[config.hidden_act]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.gate_proj is not None:
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return self.down_proj(self.act_fn(self.up_proj(x)))


class SinusoidalPositions(nn.Module):
    """Return sin and cos of the positions, scaled by 1/√hidden_size; no table, so no longest sequence.

    Vaswani et al. (arXiv:1706.03762) multiply the embedding by √hidden_size instead; up to that common factor, which the
    first norm removes, the sum is the same. With `train_scale` the scale is a parameter (crammed BERT).
    Shapes: positions [B or 1, T] → [B or 1, T, hidden_size].
    """

    def __init__(self, hidden_size: int, train_scale: bool = False) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.initial_scale = hidden_size**-0.5
        self.scale = nn.Parameter(torch.full((1,), self.initial_scale)) if train_scale else None

    def forward(self, position_ids: torch.Tensor) -> torch.Tensor:
        pairs = torch.arange(0, self.hidden_size, 2, device=position_ids.device)
        frequencies = torch.exp(pairs * (-math.log(10_000.0) / self.hidden_size))
        angles = position_ids.unsqueeze(-1).float() * frequencies
        table = torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)
        return table * (self.initial_scale if self.scale is None else self.scale)


def alibi_bias(num_heads: int, query_positions: torch.Tensor, num_keys: int) -> torch.Tensor:
    """Return −slope·|q − k| for every head, query and key; the slopes are those of Press et al. (arXiv:2108.12409).

    Shapes: query_positions [Q], counted in the keys' index → [1, H, Q, K], float32.

    >>> alibi_bias(2, torch.arange(3), 3)[0, 0, 2].tolist()
    [-0.125, -0.0625, -0.0]
    """
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    slopes += [2 ** (-4 * (2 * i + 1) / power) for i in range(num_heads - power)]
    distance = (query_positions.unsqueeze(-1) - torch.arange(num_keys, device=query_positions.device)).abs()
    return -torch.tensor(slopes, device=query_positions.device).view(1, -1, 1, 1) * distance


def eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return softmax attention and its weights, the dense form behind `attn_implementation="eager"`.

    Shapes: query [B, H, Q, D]; key and value [B, H or groups, K, D] → [B, Q, H, D] and [B, H, Q, K].
    """
    key = repeat_kv(key, module.num_key_value_groups)
    value = repeat_kv(value, module.num_key_value_groups)
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    if position_bias is not None:
        scores = scores + position_bias
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights
