"""The decoder: causal self-attention, attention to the whole source, MLP. Vaswani et al. (arXiv:1706.03762), 3.1."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from hf_efficient_attn.attention.dense_matrix import dense_attention
from hf_efficient_attn.attention.input_checks import check_mask_values
from hf_efficient_attn.attention.key_tokens import tokens_of_keys
from hf_efficient_attn.attention.notices import warn_of_weights
from hf_efficient_attn.layout.host_copies import lasting
from hf_efficient_attn.models.parts.blocks import MLP, build_norm, drop_rate, finite
from hf_efficient_attn.models.parts.cached_states import append_to_cache
from hf_efficient_attn.models.prologue import prepare_call
from hf_efficient_attn.models.sparse.attention import SparseAttention
from hf_efficient_attn.models.sparse.inputs import check_inputs

from .pretrained import SparseSeq2SeqStack, record_layers
from .seq2seq_inputs import real_target_tokens


class CrossAttention(nn.Module):
    """Attention of the target to all source tokens. [B, T, hidden_size] and [B, S, hidden_size] → [B, T, hidden_size].

    With a cache, keys and values of the source are computed once.
    """

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.head_dim = config.head_dim
        width, bias = config.hidden_size, config.attention_bias
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width, bias=bias) for _ in range(3))
        self.o_proj = nn.Linear(width, width, bias=config.attention_output_bias)
        self.dropout = nn.Dropout(config.attention_dropout)

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        source_mask: Tensor | None = None,
        past_key_values: EncoderDecoderCache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output and, with `output_attentions`, the weights [B, H, T, S], else None.

        source_mask: bool [B, 1, 1, S], True = a token; None: all are.
        """
        query = self._split(self.q_proj(hidden_states))
        # the cache may hold another precision
        key, value = (each.to(query.dtype) for each in self._keys_and_values(encoder_hidden_states, past_key_values))
        need_weights = bool(kwargs.get("output_attentions", self.config.output_attentions))
        if need_weights:
            warn_of_weights()
        out, weights = dense_attention(
            query,
            key,
            value,
            source_mask,
            None,
            self.head_dim**-0.5,
            drop_rate(self.dropout),
            need_weights,
        )
        return self.o_proj(out.transpose(1, 2).flatten(2)), weights

    def _split(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _keys_and_values(self, source: Tensor, cache: EncoderDecoderCache | None) -> tuple[Tensor, Tensor]:
        if cache is not None and cache.is_updated.get(self.layer_idx):
            layer = cache.cross_attention_cache.layers[self.layer_idx]
            return layer.keys, layer.values
        key, value = self._split(self.k_proj(source)), self._split(self.v_proj(source))
        if cache is not None:
            key, value = append_to_cache(cache.cross_attention_cache, key, value, self.layer_idx)
            cache.is_updated[self.layer_idx] = True
        return key, value


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
        source_mask: Tensor | None = None,
        past_key_values: EncoderDecoderCache | None = None,
        **kwargs: Any,
    ) -> Tensor:
        own_cache = None if past_key_values is None else past_key_values.self_attention_cache

        def read_target(states: Tensor) -> Tensor:
            return self.self_attn(states, past_key_values=own_cache, **kwargs)[0]

        def read_source(states: Tensor) -> Tensor:
            return self.cross_attn(states, encoder_hidden_states, source_mask, past_key_values, **kwargs)[0]

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

    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Return the last hidden state and, with `use_cache` (default: the config's), the cache.

        Args:
            attention_mask: of the target, [B, K] over cached and new tokens; or a matrix [B, 1, T, K].
            encoder_hidden_states, encoder_attention_mask: of the source, [B, S, hidden_size] and [B, S].
        """
        check_inputs(self.config, input_ids, inputs_embeds, kwargs)
        if inputs_embeds is None:
            inputs_embeds = self.embed(input_ids)
        check_mask_values(attention_mask)
        cache = with_cross_attention(past_key_values)
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if use_cache and cache is None and not (self.gradient_checkpointing and self.training):
            cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        call = prepare_call(self.config, inputs_embeds, attention_mask, None, cache, kwargs)
        source_mask = readable_source(encoder_attention_mask, encoder_hidden_states, call.tokens)
        masks = call.masks(self.config, is_causal=True)
        counted = real_target_tokens(attention_mask, masks["token_mask"])
        hidden_states, where = self.embeddings(replace(call, attention_mask=counted))
        kwargs = {**kwargs, **where, **masks, "past_key_values": cache}
        for layer in self.layers:
            hidden_states = layer(hidden_states, encoder_hidden_states, source_mask, **kwargs)
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=self.norm(hidden_states), past_key_values=cache
        )


def with_cross_attention(cache: Cache | None) -> EncoderDecoderCache | None:
    """Return a cache with room for the source; a cache for the target alone is completed."""
    if cache is None or isinstance(cache, EncoderDecoderCache):
        return cache
    return EncoderDecoderCache(cache, DynamicCache())


def readable_source(attention_mask: Tensor | None, source: Tensor, num_queries: int) -> Tensor | None:
    """Return which source tokens may be read, bool [B, 1, 1, S]; None: all."""
    batch_size, num_keys = source.shape[:2]
    with lasting():
        lengths = (batch_size, num_queries, num_keys, 0, 0)
        tokens, _ = tokens_of_keys(None, *lengths, attention_mask, None, is_causal=False, device=source.device)
    return None if tokens.key_mask is None else tokens.key_mask[:, None, None]
