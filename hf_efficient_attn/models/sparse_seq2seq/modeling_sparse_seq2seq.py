"""Sparse encoder-decoder: an encoder whose layers follow patterns, and a causal decoder that reads all of its output.

With windows and a global first token it is LED, with BigBird's blocks BigBird-Pegasus, with full attention the
Transformer of 2017. Sources may have any length, and be padded on either side.

Sources: Vaswani et al. (arXiv:1706.03762); Beltagy et al., "Longformer" (arXiv:2004.05150), section 7; Zaheer et al.,
"BigBird" (arXiv:2007.14062), section 4.1.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPastAndCrossAttentions,
    Seq2SeqModelOutput,
)
from transformers.utils import can_return_tuple
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from hf_efficient_attn.attention.input_checks import check_mask_values
from hf_efficient_attn.attention.processes import compare_processes
from hf_efficient_attn.models.inputs.masks import bring_inputs
from hf_efficient_attn.models.parts.embeddings import TokenEmbedding
from hf_efficient_attn.models.prologue import TableGeneration, prepare_call
from hf_efficient_attn.models.sparse.attention import SparseAttention
from hf_efficient_attn.models.sparse.block import SparseLayer
from hf_efficient_attn.models.sparse.inputs import check_inputs, global_arguments, looked_at

from .configuration_sparse_seq2seq import SparseSeq2SeqConfig
from .decoder import SparseSeq2SeqDecoder
from .heads import Seq2SeqLMHead, Seq2SeqQuestionAnsweringHead, Seq2SeqSequenceClassificationHead
from .pretrained import SparseSeq2SeqPreTrainedModel, SparseSeq2SeqStack, record_layers
from .seq2seq_inputs import check_positions, check_sides, check_source_mask, one_source, one_target, shift_source


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
        check_inputs(self.config, input_ids, inputs_embeds, kwargs)
        compare_processes(self)
        check_positions(kwargs)
        if inputs_embeds is None:
            inputs_embeds = self.embed(input_ids)
        check_source_mask(attention_mask, inputs_embeds.shape[1])
        call = prepare_call(self.config, inputs_embeds, attention_mask, None, None, kwargs)
        masks = call.masks(self.config, is_causal=False)
        masks = global_arguments(self.config, self.task, call, masks, input_ids, global_attention_mask)
        hidden_states, where = self.embeddings(call)
        kwargs = {**kwargs, **where, **masks}
        for layer in self.layers:
            hidden_states = layer(hidden_states, **kwargs)
        return BaseModelOutput(last_hidden_state=self.norm(hidden_states))


class SparseSeq2SeqModel(SparseSeq2SeqPreTrainedModel):
    """The backbone: a shared token embedding, encoder and decoder.

    Shapes: input_ids [B, S], decoder_input_ids [B, T] → [B, T, hidden_size].
    """

    # the head, sharded by columns, has the same weight; transformers adds this itself if a config has a plan
    _tp_plan = {"embed_tokens": "embedding_rowwise"}

    def __init__(self, config: SparseSeq2SeqConfig) -> None:
        super().__init__(config)
        self.embed_tokens = TokenEmbedding(config)
        self.encoder = SparseSeq2SeqEncoder(config, self.embed)
        self.decoder = SparseSeq2SeqDecoder(config, self.embed)
        self.post_init()

    def embed(self, input_ids: Tensor) -> Tensor:
        """Return token embeddings [B, T, hidden_size]; both stacks look them up here."""
        return self.embed_tokens(input_ids)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: torch.LongTensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: Any = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        global_attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Seq2SeqModelOutput:
        """Return the last hidden states of both stacks and, with `use_cache`, the cache.

        Args:
            attention_mask: 1 = a source token, [B, S], padded on either side.
            decoder_input_ids: [B, T]; by default the source after the start token, as in BART.
            decoder_attention_mask: 1 = a target token, [B, K] over cached and new tokens; None: all are.
            encoder_outputs: earlier outputs of the encoder, instead of input_ids.
            past_key_values: cache of earlier target tokens and of the source's keys and values.
            inputs_embeds, decoder_inputs_embeds: embeddings instead of tokens; √hidden_size is applied here.
            global_attention_mask: 1 = a source token that reads and is read by the whole source, [B, S]; instead of
                the config's `global_tokens`.

        Raises:
            InputError: inputs that are missing, doubled, or of the other side's length; more tokens than positions.
        """
        check_positions(kwargs)
        if decoder_input_ids is None and decoder_inputs_embeds is None:
            decoder_input_ids, decoder_attention_mask = shift_source(
                self.config, input_ids, attention_mask, decoder_attention_mask
            )
        source = one_source(input_ids, inputs_embeds, encoder_outputs)
        target = one_target(decoder_input_ids, decoder_inputs_embeds)
        tokens_asked = looked_at(self.config, self.encoder.task, input_ids)
        bring_inputs(tokens_asked, attention_mask, decoder_attention_mask, global_attention_mask)
        check_sides(attention_mask, decoder_attention_mask, source.shape[1], target.shape[1], past_key_values)
        kwargs["return_dict"] = True
        if encoder_outputs is None:
            encoder_outputs = self.encoder(input_ids, attention_mask, inputs_embeds, global_attention_mask, **kwargs)
        else:
            check_mask_values(attention_mask)
            if not isinstance(encoder_outputs, BaseModelOutput):
                encoder_outputs = BaseModelOutput(*encoder_outputs)
        read = (encoder_outputs.last_hidden_state, attention_mask, past_key_values)
        outputs = self.decoder(
            decoder_input_ids, decoder_attention_mask, *read, decoder_inputs_embeds, use_cache, **kwargs
        )
        return joined_outputs(encoder_outputs, outputs)


def joined_outputs(encoder: BaseModelOutput, decoder: BaseModelOutputWithPastAndCrossAttentions) -> Seq2SeqModelOutput:
    """Return the outputs of both stacks as one."""
    return Seq2SeqModelOutput(
        last_hidden_state=decoder.last_hidden_state,
        past_key_values=decoder.past_key_values,
        decoder_hidden_states=decoder.hidden_states,
        decoder_attentions=decoder.attentions,
        cross_attentions=decoder.cross_attentions,
        encoder_last_hidden_state=encoder.last_hidden_state,
        encoder_hidden_states=encoder.hidden_states,
        encoder_attentions=encoder.attentions,
    )


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
