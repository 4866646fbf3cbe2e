"""Collaborative heads: all heads share one map of queries and one of keys, and each weighs their numbers its own way.

    head = softmax((X W_Q diag(m_h)) (X W_K)ᵀ / √D) X W_V,h

with one vector m_h a head, of as many numbers as the shared queries and keys have, `shared_key_width`. Heads that
compare the same things need them once, so that these may be fewer than H · D; a cache keeps them, and values of all
heads. The layer follows `attention_pattern`, by the engine.

At the start, m_h is 1 for the share of head h of the numbers, and 0 for others: with H · D numbers, the heads are
ordinary ones, whose weights fit.

Source: Cordonnier, Loukas & Jaggi, "Multi-Head Attention: Collaborate Instead of Concatenate" (arXiv:2006.16362), also
in Lin et al., "A Survey of Transformers" (arXiv:2106.04554), section 4.6.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.cache_utils import Cache

from hf_efficient_attn.attention.layer_request import LayerRequest
from hf_efficient_attn.models.parts.cached_states import append_to_cache

from .passed_states import PassingAttention, check_cached_width
from .talking_heads import one_head


class CollaborativeHeadsAttention(PassingAttention):
    """Attention that follows a pattern, whose heads share queries and keys."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.key_width = config.width_of_shared_keys
        self.q_proj, self.k_proj = (
            nn.Linear(config.hidden_size, self.key_width, bias=config.attention_bias) for _ in range(2)
        )
        self.mixing = nn.Parameter(torch.empty(self.num_heads, self.key_width))

    def initialize(self) -> None:
        """Start each head with its share of the numbers."""
        owner = torch.arange(self.key_width, device=self.mixing.device) * self.num_heads // self.key_width
        own = owner == torch.arange(self.num_heads, device=self.mixing.device).unsqueeze(1)
        init.copy_(self.mixing, own.to(self.mixing.dtype))

    def _states(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shared, key = (project(hidden_states).unsqueeze(1) for project in (self.q_proj, self.k_proj))
        value = self.v_proj(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        return shared * self.mixing.to(shared.dtype).unsqueeze(1), key, value

    def _update(
        self, cache: Cache, hidden_states: Tensor, key: Tensor, value: Tensor, rotation: Any
    ) -> tuple[Tensor, Tensor, None]:
        check_cached_width(cache, self.layer_idx, (1, self.key_width), (1, self.num_heads * self.head_dim))
        # layers of static caches have as many heads of values as of keys
        key, value = append_to_cache(cache, key, one_head(value), self.layer_idx)
        return key, value.squeeze(1).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2), None

    def _compared(self, query: Tensor, key: Tensor, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        return super()._compared(query, key.expand(-1, self.num_heads, -1, -1), kwargs)

    def layer_request(self, num_keys: int, task: str | None) -> LayerRequest:
        return replace(super().layer_request(num_keys, task), head_dim=self.key_width)
