"""The decoder: causal self-attention, attention to the whole source, MLP. Vaswani et al. (arXiv:1706.03762), 3.1."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from hf_efficient_attn.attention.cache_argument import CACHE_ARGUMENT, takes_cache
from hf_efficient_attn.layout.token_mask import NO_MASK, TokenMask
from hf_efficient_attn.models.encoder_decoder.cross_attention import CrossAttention, readable_source
from hf_efficient_attn.models.encoder_decoder.inputs import real_target_tokens
from hf_efficient_attn.models.encoder_decoder.stacks import record_layers
from hf_efficient_attn.models.parts.blocks import MLP, build_norm, finite
from hf_efficient_attn.models.sparse.attention import SparseAttention

from .pretrained import SparseSeq2SeqStack


class SparseDecoderLayer(GradientCheckpointingLayer):
    """One block of the decoder. Shapes: [B, T, hidden_size] → the same."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.is_pre_norm = config.norm_position == "pre"
        self.self_attn = SparseAttention(config, layer_idx, is_decoder=True)
        has_first_norm = not self.is_pre_norm or layer_idx > 0 or config.norm_before_first_layer
        self.attention_norm = build_norm(config) if has_first_norm else nn.Identity()
        self.cross_attn = CrossAttention(config, layer_idx)
        self.cross_norm = build_norm(config)
        self.mlp = MLP(config)
        self.mlp_norm = build_norm(config)
        self.dropout = nn.Dropout(config.hidden_dropout)

    # positional, since reentrant checkpointing returns gradients for positional arguments only
    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        source: TokenMask = NO_MASK,
        cache: EncoderDecoderCache | None = None,
        **kwargs: Any,
    ) -> Tensor:
        own_cache = None if cache is None else cache.self_attention_cache

        def read_target(states: Tensor) -> Tensor:
            return self.self_attn(states, cache=own_cache, **kwargs)[0]

        def read_source(states: Tensor) -> Tensor:
            return self.cross_attn(states, encoder_hidden_states, source, cache, **kwargs)[0]

        hidden_states = self._add(hidden_states, self.attention_norm, read_target)
        hidden_states = self._add(hidden_states, self.cross_norm, read_source)
        return finite(self._add(hidden_states, self.mlp_norm, self.mlp))

    def _add(self, hidden_states: Tensor, norm: nn.Module, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        if self.is_pre_norm:
            return hidden_states + self.dropout(sublayer(norm(hidden_states)))
        return norm(hidden_states + self.dropout(sublayer(hidden_states)))


class SparseSeq2SeqDecoder(SparseSeq2SeqStack):
    """Embeddings, blocks and, if pre-norm, a last norm. Shapes: input_ids [B, T] → [B, T, hidden_size]."""

    _can_record_outputs = {
        "hidden_states": record_layers(SparseDecoderLayer, "decoder_layers"),
        "attentions": OutputRecorder(SparseAttention, index=1),
        "cross_attentions": OutputRecorder(CrossAttention, index=1),
    }

    def __init__(self, config: Any, embed: Callable[[Tensor], Tensor]) -> None:
        layers = (SparseDecoderLayer(config, index) for index in range(config.decoder_layers))
        super().__init__(config, embed, layers, "max_target_position_embeddings")

    @takes_cache
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Return the last hidden state and, with `use_cache` (default: the config's), the cache.

        Args:
            attention_mask: of the target, [B, K] over cached and new tokens; or a matrix [B, 1, T, K].
            encoder_hidden_states, encoder_attention_mask: of the source, [B, S, hidden_size] and [B, S].
        """
        call = self.target_call(input_ids, attention_mask, cache, inputs_embeds, use_cache, kwargs)
        source = readable_source(encoder_attention_mask, encoder_hidden_states, call.tokens)
        masks = call.masks(self.config, is_causal=True)
        counted = real_target_tokens(attention_mask, masks["token_mask"])
        hidden_states, where = self.embeddings(replace(call, attention_mask=counted))
        kwargs = {**kwargs, **where, **masks, "cache": call.cache}
        for layer in self.layers:
            hidden_states = layer(hidden_states, encoder_hidden_states, source, **kwargs)
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=self.norm(hidden_states), **{CACHE_ARGUMENT: call.cache}
        )
