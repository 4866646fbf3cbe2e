"""Sparse encoder-decoder: an encoder whose layers follow patterns, and a causal decoder with full cross-attention.

With windows and a global first token it is LED, with BigBird's blocks BigBird-Pegasus, with full attention the
Transformer of 2017. Sources may have any length and be padded on either side; labels are padded on the right. As in
transformers, the decoder's input is made from the labels, and −100 becomes the padding token.

Sources: Vaswani et al. (arXiv:1706.03762); Beltagy et al., "Longformer" (arXiv:2004.05150), section 7; Zaheer et al.,
"BigBird" (arXiv:2007.14062), section 4.1.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPastAndCrossAttentions
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from hf_efficient_attn.integration.forward_context import CACHE_ARGUMENT, takes_cache
from hf_efficient_attn.layout.token_mask import NO_MASK, TokenMask
from hf_efficient_attn.models.base import SparsePreTrainedModel
from hf_efficient_attn.models.encoder_decoder.heads import (
    Seq2SeqLMHead,
    Seq2SeqQuestionAnsweringHead,
    Seq2SeqSequenceClassificationHead,
)
from hf_efficient_attn.models.encoder_decoder.model import EncoderDecoder, real_target_tokens
from hf_efficient_attn.models.encoder_decoder.stacks import CrossAttention, Stack, readable_source, record_layers
from hf_efficient_attn.models.parts.blocks import Block, build_norm
from hf_efficient_attn.models.parts.embeddings import EmbeddingSum, TokenEmbedding
from hf_efficient_attn.models.prologue import TableGeneration
from hf_efficient_attn.models.sparse.attention import SparseAttention, SparseLayer, has_first_norm
from hf_efficient_attn.models.sparse.inputs import global_inputs, looked_at, without_globals

from .configuration_sparse_seq2seq import SparseSeq2SeqConfig

# What the backbone of the sparse encoder-decoder, its two stacks and its heads share.


class SparseSeq2SeqPreTrainedModel(SparsePreTrainedModel):
    """Weight initialisation, loading checks and capabilities."""

    config_class = SparseSeq2SeqConfig
    config: SparseSeq2SeqConfig
    base_model_prefix = "model"
    model_tags = ["efficient-attention", "sparse-seq2seq", "hf_efficient_attn"]
    extra_inputs = ("global_attention_mask",)
    _no_split_modules = ["SparseLayer", "SparseDecoderLayer"]

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        # copied and other special maps set their own initial values
        if self.config.matrix_init == "glorot" and type(module) is nn.Linear:
            init.xavier_uniform_(module.weight)


class SparseSeq2SeqStack(Stack, SparseSeq2SeqPreTrainedModel):
    """Base of encoder and decoder: embeddings, blocks and, if pre-norm, a last norm.

    Args:
        embed, layers: see `Stack`.
        size_field: the name of the config field with the number of learned positions.
    """

    def __init__(
        self,
        config: SparseSeq2SeqConfig,
        embed: Callable[[Tensor], Tensor],
        layers: Iterable[nn.Module],
        size_field: str = "max_position_embeddings",
    ) -> None:
        norm = build_norm(config) if config.norm_position == "pre" else nn.Identity()
        super().__init__(config, embed, EmbeddingSum(config, size_field), layers, norm)


# The decoder: causal self-attention, attention to the whole source, MLP. Vaswani et al. (arXiv:1706.03762), 3.1.


class SparseDecoderLayer(Block):
    """One block of the decoder. Shapes: [B, T, hidden_size] → the same."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        attention = SparseAttention(config, layer_idx, is_decoder=True)
        cross = CrossAttention(config, layer_idx)
        super().__init__(config, attention, False, cross, has_first_norm(config, layer_idx))

    # `encoder_hidden_states` is positional, because reentrant checkpointing has gradients only for positional arguments
    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        source: TokenMask = NO_MASK,
        cache: EncoderDecoderCache | None = None,
        **kwargs: Any,
    ) -> Tensor:
        own_cache = None if cache is None else cache.self_attention_cache
        attended, _ = self.self_attn(self.before(hidden_states, self.attention_norm), cache=own_cache, **kwargs)
        hidden_states = self.after(hidden_states, attended, self.attention_norm)
        read = self.before(hidden_states, self.cross_norm)
        attended, _ = self.cross_attn(read, encoder_hidden_states, source, cache, **kwargs)
        return self.feed(self.after(hidden_states, attended, self.cross_norm))


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
            attention_mask: the target's mask, [B, K] over cached and new tokens; or a matrix [B, 1, T, K].
            encoder_hidden_states, encoder_attention_mask: the source's, [B, S, hidden_size] and [B, S].
        """
        call = self.target_call(input_ids, attention_mask, cache, inputs_embeds, use_cache, kwargs)
        source = readable_source(encoder_attention_mask, encoder_hidden_states, call.tokens)
        inputs = without_globals(call.masks(self.config, is_causal=True))
        counted = real_target_tokens(attention_mask, inputs.token_mask)
        hidden_states, where = self.embeddings(replace(call, attention_mask=counted))
        kwargs = {**kwargs, **where, "inputs": inputs, "cache": call.cache}
        for layer in self.layers:
            hidden_states = layer(hidden_states, encoder_hidden_states, source, **kwargs)
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=self.norm(hidden_states), **{CACHE_ARGUMENT: call.cache}
        )


class SparseSeq2SeqEncoder(SparseSeq2SeqStack):
    """Embeddings, blocks and, if pre-norm, a last norm. Shapes: input_ids [B, S] → [B, S, hidden_size]."""

    _can_record_outputs = {
        "hidden_states": record_layers(SparseLayer, "encoder_layers"),
        "attentions": OutputRecorder(SparseAttention, index=1),
    }

    def __init__(self, config: SparseSeq2SeqConfig, embed: Callable[[Tensor], Tensor]) -> None:
        super().__init__(config, embed, (SparseLayer(config, index) for index in range(config.encoder_layers)))

    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """Return the last hidden state; arguments as in `SparseSeq2SeqModel.forward`."""
        call = self.source_call(input_ids, attention_mask, inputs_embeds, kwargs)
        masks = call.masks(self.config, is_causal=False)
        inputs = global_inputs(self.config, self.task, call, masks, input_ids, global_attention_mask)
        hidden_states, where = self.embeddings(call)
        for layer in self.layers:
            hidden_states = layer(hidden_states, inputs=inputs, **where, **kwargs)
        return BaseModelOutput(last_hidden_state=self.norm(hidden_states))


class SparseSeq2SeqModel(EncoderDecoder, SparseSeq2SeqPreTrainedModel):
    """The backbone: a shared token embedding, encoder and decoder.

    Besides the inputs of every encoder-decoder it takes `global_attention_mask`, [B, S]: 1 = a source token that
    attends to the whole source and is attended to by all of it; instead of the config's `global_tokens`.

    Shapes: input_ids [B, S], decoder_input_ids [B, T] → [B, T, hidden_size].
    """

    def __init__(self, config: SparseSeq2SeqConfig) -> None:
        super().__init__(config)
        self.embed_tokens = TokenEmbedding(config)
        self.encoder = SparseSeq2SeqEncoder(config, self.embed)
        self.decoder = SparseSeq2SeqDecoder(config, self.embed)
        self.post_init()

    def tokens_to_prefetch(self, input_ids: Tensor | None) -> Tensor | None:
        """Return the source's tokens if the rule for global tokens needs them, otherwise None."""
        return looked_at(self.config, self.encoder.task, input_ids)


class SparseSeq2SeqForConditionalGeneration(
    TableGeneration, Seq2SeqLMHead, SparseSeq2SeqPreTrainedModel, GenerationMixin
):
    backbone_class = SparseSeq2SeqModel


class SparseSeq2SeqForSequenceClassification(Seq2SeqSequenceClassificationHead, SparseSeq2SeqPreTrainedModel):
    backbone_class = SparseSeq2SeqModel


class SparseSeq2SeqForQuestionAnswering(Seq2SeqQuestionAnsweringHead, SparseSeq2SeqPreTrainedModel):
    backbone_class = SparseSeq2SeqModel


__all__ = [
    "SparseSeq2SeqForConditionalGeneration",
    "SparseSeq2SeqForQuestionAnswering",
    "SparseSeq2SeqForSequenceClassification",
    "SparseSeq2SeqModel",
    "SparseSeq2SeqPreTrainedModel",
]
