"""BP-Transformer that translates: tokens and spans of a source, and those of a target, whose tokens read the source.

The encoder updates the nodes of the source's tree, whose tokens read on both sides, the decoder those of the target's,
whose tokens read to their left:

    h ← N(h + attention(h; nodes of the target that it reads))
    h ← N(h + attention(h; tokens of the source))             tokens alone
    h ← N(h + W2 relu(W1 h))

Every target token reads every source token or, of a document whose sentences are aligned to those of its translation,
every token of its own sentence. Sources, and targets, may have any length, and be padded on either side; labels
are padded behind.

Sources: Ye, Guo, Gan, Qiu, Zhang (arXiv:1911.04070), and the authors' code, in which tokens of the source are all that
is read across, and tokens of the target all that reads it. Of these points neither says enough, and they are decided
here:

- Spans of the target have no second attention, and no norm behind it: they pass on what their tokens have read of the
  source, from the next layer on.
- Spans of the source are read by its own tokens alone; the decoder is given its tokens.
- Both stacks begin with norms of their own, and source, target and output share one embedding, whose vectors are not
  scaled. (The authors share it for WMT14.)

Documents cannot be packed.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPastAndCrossAttentions
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from hf_efficient_attn.attention.cache_argument import CACHE_ARGUMENT, takes_cache
from hf_efficient_attn.models.base import EfficientPreTrainedModel
from hf_efficient_attn.models.encoder_decoder.cross_attention import CrossAttention, readable_source
from hf_efficient_attn.models.encoder_decoder.generation import LeftPaddedPrompts
from hf_efficient_attn.models.encoder_decoder.heads import Seq2SeqLMHead
from hf_efficient_attn.models.encoder_decoder.inputs import real_target_tokens
from hf_efficient_attn.models.encoder_decoder.model import EncoderDecoder
from hf_efficient_attn.models.encoder_decoder.stacks import Stack, record_layers
from hf_efficient_attn.models.implementations import backend_of
from hf_efficient_attn.models.inputs.masks import padding_mask
from hf_efficient_attn.models.parts.blocks import build_norm
from hf_efficient_attn.models.parts.positions import Positions
from hf_efficient_attn.models.prologue import PreparedCall, TableGeneration
from hf_efficient_attn.models.tree.attention import TreeAttention
from hf_efficient_attn.models.tree.block import BPCrossLayer, BPLayer
from hf_efficient_attn.models.tree.call_nodes import CLOSED, nodes_of

from .configuration_bp_seq2seq import BPSeq2SeqConfig
from .sentences import INPUTS, SentencePrompts, aligned_source, check_sentences


class FirstTokens(nn.Module):
    """The tokens before the first layer: positions, if there are any, dropout and a norm. [B, T, hidden_size] → same.

    size_field: names the field that has the number of learned positions.
    """

    def __init__(self, config: BPSeq2SeqConfig, size_field: str) -> None:
        super().__init__()
        self.positions = Positions(config, size_field)
        self.dropout = nn.Dropout(config.embedding_dropout)
        self.norm = build_norm(config)

    def forward(self, call: PreparedCall) -> Tensor:
        return self.norm(self.dropout(self.positions(call.embedded, call)[0]))


class BPSeq2SeqPreTrainedModel(EfficientPreTrainedModel):
    """Weight initialisation, loading checks and capabilities shared by the backbone, its stacks and its head."""

    config_class = BPSeq2SeqConfig
    config: BPSeq2SeqConfig
    base_model_prefix = "model"
    model_tags = ["efficient-attention", "bp-transformer", "hf_efficient_attn"]
    decoder_inputs = INPUTS
    _no_split_modules = ["BPLayer", "BPCrossLayer"]


class BPSeq2SeqStack(Stack, BPSeq2SeqPreTrainedModel):
    """Base of encoder and decoder: embeddings and blocks; a post-norm block ends with a norm."""

    def __init__(
        self, config: BPSeq2SeqConfig, embed: Callable[[Tensor], Tensor], layers: Iterable[nn.Module], size_field: str
    ) -> None:
        super().__init__(config, embed, FirstTokens(config, size_field), layers, nn.Identity())


class BPSeq2SeqEncoder(BPSeq2SeqStack):
    """Embeddings and blocks over the source's tree. Shapes: input_ids [B, S] → [B, S, hidden_size]."""

    _can_record_outputs = {
        "hidden_states": record_layers(BPLayer, "encoder_layers"),
        "attentions": OutputRecorder(TreeAttention, index=1),
    }

    def __init__(self, config: BPSeq2SeqConfig, embed: Callable[[Tensor], Tensor]) -> None:
        layers = (BPLayer(config, index, is_causal=False) for index in range(config.encoder_layers))
        super().__init__(config, embed, layers, "max_position_embeddings")

    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """Return the last states of the source's tokens; arguments as in `BPSeq2SeqModel.forward`."""
        # `generate` passes on what only the decoder reads by
        kwargs.pop(INPUTS[0], None)
        call = self.source_call(input_ids, attention_mask, inputs_embeds, kwargs)
        backend_of(self.config)
        nodes = nodes_of(self.config, call, is_causal=False)
        tokens = self.embeddings(call)
        spans = nodes.first_spans(tokens)
        for layer in self.layers:
            tokens, spans = layer(tokens, spans, nodes, **kwargs)
        return BaseModelOutput(last_hidden_state=self.norm(tokens).contiguous())


class BPSeq2SeqDecoder(BPSeq2SeqStack):
    """Embeddings and blocks over the target's tree. Shapes: input_ids [B, T] → [B, T, hidden_size]."""

    _can_record_outputs = {
        "hidden_states": record_layers(BPCrossLayer, "decoder_layers"),
        "attentions": OutputRecorder(TreeAttention, index=1),
        "cross_attentions": OutputRecorder(CrossAttention, index=1),
    }

    def __init__(self, config: BPSeq2SeqConfig, embed: Callable[[Tensor], Tensor]) -> None:
        layers = (BPCrossLayer(config, index, is_causal=True) for index in range(config.decoder_layers))
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
        sentence_ids: Tensor | None = None,
        decoder_sentence_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Return the last states of the target's tokens and, with `use_cache` (default: the config's), the cache.

        Args:
            attention_mask: of the target, [B, K] over cached and new tokens; or a matrix [B, 1, T, K], if it only
                leaves out padding and later tokens.
            encoder_hidden_states, encoder_attention_mask: of the source, [B, S, hidden_size] and [B, S].
            sentence_ids: the number of the sentence of each source token, [B, S].
            decoder_sentence_ids: of each target token that is no cached one, [B, T], the number of the sentence of the
                token that is predicted from it: it reads the source's tokens of this number, and nothing across if
                there are none. None for both: it reads the whole source.
        """
        call = self.target_call(input_ids, attention_mask, cache, inputs_embeds, use_cache, kwargs)
        mask = padding_mask(call.attention_mask, call.batch_size, CLOSED, is_causal=True)
        call = replace(call, attention_mask=mask)
        check_sentences(sentence_ids, decoder_sentence_ids, encoder_hidden_states, call.embedded)
        readable = readable_source(encoder_attention_mask, encoder_hidden_states, call.tokens)
        source = (encoder_hidden_states, aligned_source(readable, sentence_ids, decoder_sentence_ids))
        nodes = nodes_of(self.config, call, is_causal=True)
        tokens = self.embeddings(counted_by_tokens(self.config, call))
        spans = nodes.first_spans(tokens)
        for layer in self.layers:
            tokens, spans = layer(tokens, spans, nodes, *source, cache=call.cache, **kwargs)
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=self.norm(tokens).contiguous(), **{CACHE_ARGUMENT: call.cache}
        )


def counted_by_tokens(config: BPSeq2SeqConfig, call: PreparedCall) -> PreparedCall:
    """Return a decoder's call with the mask over which positions are counted, for any form of its mask."""
    mask = call.attention_mask
    if mask is None or mask.ndim != 4:
        return call
    token_mask = call.masks(config, is_causal=True)["token_mask"]
    return replace(call, attention_mask=real_target_tokens(mask, token_mask))


class BPSeq2SeqModel(EncoderDecoder, BPSeq2SeqPreTrainedModel):
    """The backbone: a shared token embedding, encoder and decoder.

    Shapes: input_ids [B, S], decoder_input_ids [B, T] → [B, T, hidden_size]. For `sentence_ids` and
    `decoder_sentence_ids`, which align the sentences of a document and of its translation, see `BPSeq2SeqDecoder`.
    """

    def __init__(self, config: BPSeq2SeqConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.encoder = BPSeq2SeqEncoder(config, self.embed)
        self.decoder = BPSeq2SeqDecoder(config, self.embed)
        self.post_init()


class BPSeq2SeqForConditionalGeneration(
    SentencePrompts, LeftPaddedPrompts, TableGeneration, Seq2SeqLMHead, BPSeq2SeqPreTrainedModel, GenerationMixin
):
    backbone_class = BPSeq2SeqModel


__all__ = [
    "BPSeq2SeqForConditionalGeneration",
    "BPSeq2SeqModel",
    "BPSeq2SeqPreTrainedModel",
]
