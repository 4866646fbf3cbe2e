"""Positions: sinusoidal, learned, rotary, ALiBi, or none, behind one module.

Shapes: B batch, T new tokens, K cached and new tokens, H heads, D head size.
"""

import math
from typing import Any

import torch
from torch import nn
from transformers import initialization as init
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from hf_efficient_attn.errors import InputError


class Positions(nn.Module):
    """Tell a model where its tokens are: add to the embedding, or hand something to attention.

    Reads from the config: `position_embedding_type` (`sinusoidal`, `scaled_sinusoidal`, `learned`, `rope`, `alibi`,
    `none`), `hidden_size`, `num_attention_heads`, `max_position_embeddings`, `initializer_range`, and for `rope`
    `rope_parameters`.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.kind = config.position_embedding_type
        self.num_heads = config.num_attention_heads
        self.table: nn.Module | None = None
        self.rotary = LlamaRotaryEmbedding(config) if self.kind == "rope" else None
        if self.kind == "sinusoidal":
            self.table = SinusoidalPositions(config.hidden_size, config.initializer_range)
        elif self.kind == "scaled_sinusoidal":
            self.table = SinusoidalPositions(config.hidden_size, config.hidden_size**-0.5, train_scale=True)
        elif self.kind == "learned":
            self.table = nn.Embedding(config.max_position_embeddings, config.hidden_size)

    def forward(
        self,
        embedded: torch.Tensor,
        attention_mask: Any,
        position_ids: torch.Tensor | None,
        past_tokens: int | torch.Tensor,
        num_keys: int,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return the embedding with positions added, and keyword arguments for every attention layer.

        Args:
            embedded: [B, T, hidden_size].
            attention_mask: [B, K or more], 1 = real token; then positions count real tokens only. A mask that is a
                matrix says nothing about positions.
            position_ids: [B or 1, T]; by default derived from the two arguments around it.
            past_tokens, num_keys: T new tokens follow `past_tokens` cached ones; attention sees `num_keys`.

        Raises:
            InputError: a position past the end of the learned table.
        """
        tokens = embedded.shape[1]
        index = torch.arange(tokens, device=embedded.device) + past_tokens
        if self.kind == "alibi":
            bias = alibi_bias(self.num_heads, index, num_keys).to(embedded.dtype)
            if self.config._attn_implementation == "flex_attention":
                bias = bias.expand(len(embedded), -1, -1, -1)  # flex looks it up by row and does not broadcast
            return embedded, {"position_bias": bias}
        if position_ids is None:
            position_ids = index.unsqueeze(0)
            if isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2:
                position_ids = (attention_mask.long().cumsum(-1) - 1).clamp(min=0).index_select(1, index)
        if self.kind == "learned" and not torch.compiler.is_compiling():
            self._check_table(position_ids)
        if self.rotary is not None:
            return embedded, {"position_embeddings": self.rotary(embedded, position_ids)}
        if self.table is None:
            return embedded, {}
        return embedded + self.table(position_ids).to(embedded.dtype), {}

    def _check_table(self, position_ids: torch.Tensor) -> None:
        size, last = self.table.num_embeddings, int(position_ids.max())
        if last >= size:
            raise InputError(
                f"The sequence reaches position {last}, but the learned position table has "
                f"max_position_embeddings={size} rows. Truncate to {size} tokens, or train with a larger table or with "
                "position_embedding_type='sinusoidal', 'alibi' or 'rope', which have no longest sequence."
            )


class SinusoidalPositions(nn.Module):
    """Return `scale` times sin and cos of the positions; no table, so no longest sequence.

    Vaswani et al. (arXiv:1706.03762) add sinusoids of amplitude 1 to embeddings multiplied up to unit variance. Here
    embeddings keep their start, so `Positions` gives the sinusoids the amplitude `initializer_range` instead: the same
    sum up to a common factor, which the first norm removes. With `train_scale` the scale is a parameter that starts at
    1/√hidden_size (crammed BERT). Shapes: positions [B or 1, T] → [B or 1, T, hidden_size].
    """

    def __init__(self, hidden_size: int, scale: float = 1.0, train_scale: bool = False) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.initial_scale = scale
        self.scale = nn.Parameter(torch.full((1,), self.initial_scale)) if train_scale else None

    def initialize(self) -> None:
        if self.scale is not None:
            init.constant_(self.scale, self.initial_scale)

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
