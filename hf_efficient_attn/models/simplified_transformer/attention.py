"""Plain and shaped attention of simplified blocks: α·I + β·A − γ·C, whose A is softmax attention."""

from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_efficient_attn.attention.cache_argument import append_paged, is_paged
from hf_efficient_attn.attention.layer_patterns import NAME
from hf_efficient_attn.attention.sharded.dealt_heads import deal_heads
from hf_efficient_attn.attention.sharded.sequence_shards import shards_of
from hf_efficient_attn.models.parts.blocks import InitializedLinear, drop_rate, eager_attention_forward
from hf_efficient_attn.models.parts.positions import rotate_both

from .centering import Centering
from .configuration_simplified_transformer import SimplifiedTransformerConfig
from .pattern_mean import mean_of_read, reads_selected
from .projections import Gain, build_projection
from .running_sum_cache import append_and_sum, merge_heads
from .spanned_attention import SpannedAttention


class SimplifiedTransformerAttention(nn.Module):
    """Plain or shaped multi-head attention. [B, T, hidden_size] → the same, the weights A or None, the mean span."""

    # under which it reads what an indexer (`index`) chooses
    index_implementations = (NAME,)

    def __init__(self, config: SimplifiedTransformerConfig, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.key_value_heads
        self.scaling = self.head_dim**-0.5
        self.is_causal = config.is_causal
        bias = config.attention_bias != "none"
        key_width = config.key_value_heads * self.head_dim
        query_std = config.query_init_std
        if query_std is None:
            query_std = 0.0 if config.is_shaped else config.initializer_range
        self.q_proj = InitializedLinear(config.hidden_size, config.hidden_size, bias, query_std)
        self.k_proj = InitializedLinear(config.hidden_size, key_width, bias, config.key_init_std)
        self.v_proj = build_projection(config, layer_idx, "value")
        self.o_proj = build_projection(config, layer_idx, "projection")
        self.spanned = None if config.span is None else SpannedAttention(config, layer_idx)
        self.dropout = nn.Dropout(config.attention_dropout)
        self.has_head_gains = config.has_head_gains
        if self.has_head_gains:
            num_gains = config.num_attention_heads if config.per_head_gains else 1
            self.identity_gain = Gain(config, "identity_gain", layer_idx, num_gains)
            self.softmax_gain = Gain(config, "softmax_gain", layer_idx, num_gains)
            self.centering_gain = Gain(config, "centering_gain", layer_idx, num_gains)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        centering: Centering | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        query, key = self.q_proj(hidden_states), self.k_proj(hidden_states)
        values = hidden_states if self.v_proj is None else self.v_proj(hidden_states)
        query, key, value = (self._heads(each) for each in (query, key, values))
        if position_embeddings is not None:
            query, key = rotate_both(query, key, *position_embeddings)

        is_of_read = centering is not None and reads_selected(self)
        if is_of_read:
            # of all tokens
            centering = None
        past_sum = 0.0
        if is_paged(cache):
            key, value = append_paged(cache, key, value, self.layer_idx, kwargs)
        elif cache is not None:
            key, value, past_sum = append_and_sum(cache, key, value, self.layer_idx, centering, values)

        centre, span = None, None
        if self.spanned is not None:
            options = {**kwargs, "dropout": drop_rate(self.dropout)}
            out, weights, centre, span = self.spanned(hidden_states, query, key, value, attention_mask, **options)
        else:
            attention = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
            dropout = drop_rate(self.dropout)
            out, weights = attention(
                self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs
            )
        if is_of_read:
            centre = mean_of_read(self, query, key, value, attention_mask, **kwargs)
        if centering is not None:
            centre = self._centre(centering, value, values, past_sum)
        return self._shaped(out, values, centre), weights, span

    def _heads(self, states: torch.Tensor) -> torch.Tensor:
        """Return [B, T, H · D] as [B, H, T, D]."""
        return states.view(*states.shape[:-1], -1, self.head_dim).transpose(1, 2)

    def _shaped(self, out: torch.Tensor, values: torch.Tensor, centre: torch.Tensor | None) -> torch.Tensor:
        """Return W^P of α·V + β·A·V − γ·C·V, [B, T, hidden_size], of A·V and C·V in heads, [B, T or 1, H, D]."""
        heads = (*values.shape[:-1], -1, self.head_dim)
        if self.has_head_gains:
            out = self.identity_gain(values.view(heads), onto=self.softmax_gain(out.view(heads)))
        if centre is not None:
            out = self.centering_gain(centre, onto=out, sign=-1)
        out = out.reshape(*values.shape[:-1], -1)
        return out if self.o_proj is None else self.o_proj(out)

    def _centre(
        self, centering: Centering, value: torch.Tensor, values: torch.Tensor, past_sum: torch.Tensor | float
    ) -> torch.Tensor:
        """Return C·V, [B, T or 1, H, D]."""
        shards = shards_of(self)
        if shards is None or centering.shared_tokens is None:
            mean = centering.mean(merge_heads(value) if centering.matrix is not None else values, past_sum)
            return mean.unflatten(-1, (-1, self.head_dim))
        dealt = deal_heads(shards, value.shape[1], centering.shared_tokens)
        mean = centering.mean(merge_heads(dealt.whole_texts(value))).unflatten(-1, (-1, self.head_dim))
        return dealt.own_rows(mean.expand(-1, centering.shared_tokens, -1, -1))
