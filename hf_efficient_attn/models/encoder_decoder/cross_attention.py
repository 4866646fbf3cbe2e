"""Attention of a decoder to its source: tokens that an encoder has read. Vaswani et al. (arXiv:1706.03762)."""

from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache

from hf_efficient_attn.attention.dense_matrix import dense_attention
from hf_efficient_attn.attention.key_tokens import tokens_of_keys
from hf_efficient_attn.attention.notices import warn_of_weights
from hf_efficient_attn.attention.own_segments import attend_own_segments
from hf_efficient_attn.layout.token_mask import NO_MASK, TokenMask
from hf_efficient_attn.layout.transfer import lasting
from hf_efficient_attn.models.implementations import backend_of
from hf_efficient_attn.models.parts.blocks import drop_rate
from hf_efficient_attn.models.parts.cached_states import append_to_cache


class CrossAttention(nn.Module):
    """Attention of the target to source tokens. [B, T, hidden_size] and [B, S, hidden_size] → [B, T, hidden_size].

    A target token reads all of them, or those of its own segment. With a cache, keys and values of the source are
    computed once.
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
        source: TokenMask = NO_MASK,
        cache: EncoderDecoderCache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output and, with `output_attentions`, the weights [B, H, T, S], else None.

        source: which source tokens may be read, and the segments of these and of the target, if there are any.
        """
        query = self._split(self.q_proj(hidden_states))
        # the cache may hold another precision
        key, value = (each.to(query.dtype) for each in self._keys_and_values(encoder_hidden_states, cache))
        need_weights = bool(kwargs.get("output_attentions", self.config.output_attentions))
        if need_weights:
            warn_of_weights()
        scale, dropout = self.head_dim**-0.5, drop_rate(self.dropout)
        if source.segment_ids is None or need_weights:
            pairs = open_pairs(source)
            out, weights = dense_attention(query, key, value, pairs, None, scale, dropout, need_weights)
        else:
            backend = backend_of(self.config)
            out, weights = attend_own_segments(query, key, value, source, scale, dropout, backend), None
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


def with_cross_attention(cache: Cache | None) -> EncoderDecoderCache | None:
    """Return a cache with room for the source; a cache for the target alone is completed."""
    if cache is None or isinstance(cache, EncoderDecoderCache):
        return cache
    return EncoderDecoderCache(cache, DynamicCache())


def readable_source(attention_mask: Tensor | None, source: Tensor, num_queries: int) -> TokenMask:
    """Return which source tokens may be read; source: [B, S, hidden_size]."""
    batch_size, num_keys = source.shape[:2]
    with lasting():
        lengths = (batch_size, num_queries, num_keys, 0, 0)
        tokens, _ = tokens_of_keys(None, *lengths, attention_mask, None, is_causal=False, device=source.device)
    return tokens


def open_pairs(source: TokenMask) -> Tensor | None:
    """Return which target token reads which source token, bool that broadcasts to [B, 1, T, S]; None: all read all."""
    readable = None if source.key_mask is None else source.key_mask[:, None, None]
    of_source, of_target = source.segment_ids, source.query_segment_ids
    if of_source is None or of_target is None:
        return readable
    same = of_target[:, None, :, None] == of_source[:, None, None]
    return same if readable is None else same & readable
