"""The two stacks of an encoder-decoder: what they are made of, and what each does before its first layer."""

from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.utils.output_capturing import OutputRecorder

from hf_efficient_attn.attention.functional import attend_own_segments
from hf_efficient_attn.attention.layer import dense_attention, warn_of_weights
from hf_efficient_attn.integration.masks import tokens_of_keys
from hf_efficient_attn.integration.unsupported import check_mask_values
from hf_efficient_attn.layout.token_mask import NO_MASK, TokenMask
from hf_efficient_attn.layout.transfer import outside_inference_mode
from hf_efficient_attn.models.base import backend_of
from hf_efficient_attn.models.encoder_decoder.model import check_positions, check_source_mask
from hf_efficient_attn.models.parts.attention import MultiHeadAttention
from hf_efficient_attn.models.parts.blocks import append_to_cache, drop_rate
from hf_efficient_attn.models.prologue import PreparedCall

# Attention of a decoder to its source, the output of an encoder. Vaswani et al. (arXiv:1706.03762).


class CrossAttention(MultiHeadAttention):
    """Attention of the target to source tokens. [B, T, hidden_size] and [B, S, hidden_size] → [B, T, hidden_size].

    A target token attends to all source tokens, or to those of its own segment. With a cache, keys and values of the
    source are computed once.
    """

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx, is_causal=False)
        self.make_maps()

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        source: TokenMask = NO_MASK,
        cache: EncoderDecoderCache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output and, with `output_attentions`, the weights [B, H, T, S], else None.

        source: which source tokens are not masked, and the segments of source and target tokens, if there are any.
        """
        query = self.heads(self.q_proj(hidden_states))
        # the cache may hold another precision
        key, value = (each.to(query.dtype) for each in self._keys_and_values(encoder_hidden_states, cache))
        need_weights = self.needs_weights(kwargs)
        if need_weights:
            warn_of_weights()
        scale, dropout = self.scaling, drop_rate(self.dropout)
        if source.segment_ids is None or need_weights:
            pairs = open_pairs(source)
            out, weights = dense_attention(query, key, value, pairs, None, scale, dropout, need_weights)
        else:
            backend = backend_of(self.config)
            out, weights = attend_own_segments(query, key, value, source, scale, dropout, backend), None
        return self.o_proj(out.transpose(1, 2).flatten(2)), weights

    def _keys_and_values(self, source: Tensor, cache: EncoderDecoderCache | None) -> tuple[Tensor, Tensor]:
        if cache is not None and cache.is_updated.get(self.layer_idx):
            layer = cache.cross_attention_cache.layers[self.layer_idx]
            return layer.keys, layer.values
        key, value = self.heads(self.k_proj(source)), self.heads(self.v_proj(source))
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
    """Return the token mask of the source [B, S, hidden_size], which says what target tokens may attend to."""
    batch_size, num_keys = source.shape[:2]
    with outside_inference_mode():
        lengths = (batch_size, num_queries, num_keys, 0, 0)
        tokens, _ = tokens_of_keys(None, *lengths, attention_mask, None, is_causal=False, device=source.device)
    return tokens


def open_pairs(source: TokenMask) -> Tensor | None:
    """Return which pairs of target and source token are allowed, bool that broadcasts to [B, 1, T, S]; None: all."""
    readable = None if source.key_mask is None else source.key_mask[:, None, None]
    of_source, of_target = source.segment_ids, source.query_segment_ids
    if of_source is None or of_target is None:
        return readable
    same = of_target[:, None, :, None] == of_source[:, None, None]
    return same if readable is None else same & readable


def record_layers(layer_class: type[nn.Module], count: str) -> OutputRecorder:
    """Return the recorder of a stack's hidden states; `count` is the config's attribute with its number of layers.

    Versions of transformers that cannot select hidden states by negative numbers neither take nor need the count.
    """
    named = {field.name for field in fields(OutputRecorder)}
    return OutputRecorder(layer_class, **({"num_hidden_layers_key": count} if "num_hidden_layers_key" in named else {}))


class Stack:
    """Mixin over a family's `PreTrainedModel`: embeddings, blocks and a last norm.

    Args:
        embed: a method of the model that looks up the token embedding, which source and target share, so that
            replacing it there (resizing, adapters) affects both stacks.
        embeddings: the module that follows: positions, norm, dropout.
        layers: the blocks.
        norm: the module after the last block.
    """

    _tp_plan = {"layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"}

    def __init__(
        self,
        config: Any,
        embed: Callable[[Tensor], Tensor],
        embeddings: nn.Module,
        layers: Iterable[nn.Module],
        norm: nn.Module,
    ) -> None:
        super().__init__(config)
        self.embed = embed
        self.embeddings = embeddings
        self.layers = nn.ModuleList(layers)
        self.norm = norm
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """Return the token embedding of the model, which both stacks share."""
        owner: Any = self.embed.__self__  # type: ignore[attr-defined]
        return owner.get_input_embeddings()  # type: ignore[no-any-return]

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the token embedding of the model, and so of both stacks."""
        owner: Any = self.embed.__self__  # type: ignore[attr-defined]
        owner.set_input_embeddings(value)

    def source_call(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        inputs_embeds: Tensor | None,
        options: dict[str, Any],
    ) -> PreparedCall:
        """Return the inputs of an encoder, checked and completed.

        options: the call's other arguments.
        """
        check_positions(options)
        given = input_ids if inputs_embeds is None else inputs_embeds
        if given is not None and given.ndim > 1:
            check_source_mask(attention_mask, given.shape[1])
        return self.prepare(input_ids, attention_mask, None, inputs_embeds, options)

    def target_call(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        cache: Cache | None,
        inputs_embeds: Tensor | None,
        use_cache: bool | None,
        options: dict[str, Any],
    ) -> PreparedCall:
        """Return the inputs of a decoder, checked and completed, with a cache that has room for the source, if any.

        use_cache: None: as the config says.
        """
        check_mask_values(attention_mask)
        cache = with_cross_attention(cache)
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if use_cache and cache is None and not (self.gradient_checkpointing and self.training):
            cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        return self.prepare(input_ids, attention_mask, None, inputs_embeds, options, cache)
