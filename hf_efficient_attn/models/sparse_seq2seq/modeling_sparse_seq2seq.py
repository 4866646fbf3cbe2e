"""Sparse encoder-decoder: an encoder whose layers follow patterns, and a causal decoder that reads all of its output.

With windows and a global first token it is LED, with BigBird's blocks BigBird-Pegasus, with full attention the
Transformer of 2017. Sources may have any length, and be padded on either side, labels
behind: what the decoder reads is made of them as in Transformers, where −100 becomes a padding token.

Sources: Vaswani et al. (arXiv:1706.03762); Beltagy et al., "Longformer" (arXiv:2004.05150), section 7; Zaheer et al.,
"BigBird" (arXiv:2007.14062), section 4.1.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from hf_efficient_attn.models.encoder_decoder.heads import (
    Seq2SeqLMHead,
    Seq2SeqQuestionAnsweringHead,
    Seq2SeqSequenceClassificationHead,
)
from hf_efficient_attn.models.encoder_decoder.model import EncoderDecoder
from hf_efficient_attn.models.encoder_decoder.stacks import record_layers
from hf_efficient_attn.models.parts.embeddings import TokenEmbedding
from hf_efficient_attn.models.prologue import TableGeneration
from hf_efficient_attn.models.sparse.attention import SparseAttention
from hf_efficient_attn.models.sparse.block import SparseLayer
from hf_efficient_attn.models.sparse.inputs import global_arguments, looked_at

from .configuration_sparse_seq2seq import SparseSeq2SeqConfig
from .decoder import SparseSeq2SeqDecoder
from .pretrained import SparseSeq2SeqPreTrainedModel, SparseSeq2SeqStack


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
        masks = global_arguments(self.config, self.task, call, masks, input_ids, global_attention_mask)
        hidden_states, where = self.embeddings(call)
        kwargs = {**kwargs, **where, **masks}
        for layer in self.layers:
            hidden_states = layer(hidden_states, **kwargs)
        return BaseModelOutput(last_hidden_state=self.norm(hidden_states))


class SparseSeq2SeqModel(EncoderDecoder, SparseSeq2SeqPreTrainedModel):
    """The backbone: a shared token embedding, encoder and decoder.

    Beside the inputs of every encoder-decoder it takes `global_attention_mask`: 1 = a source token that reads and is
    read by the whole source, [B, S]; instead of the config's `global_tokens`.

    Shapes: input_ids [B, S], decoder_input_ids [B, T] → [B, T, hidden_size].
    """

    def __init__(self, config: SparseSeq2SeqConfig) -> None:
        super().__init__(config)
        self.embed_tokens = TokenEmbedding(config)
        self.encoder = SparseSeq2SeqEncoder(config, self.embed)
        self.decoder = SparseSeq2SeqDecoder(config, self.embed)
        self.post_init()

    def asked_tokens(self, input_ids: Tensor | None) -> Tensor | None:
        """Return the source's tokens if the rule for global tokens looks at them, otherwise None."""
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
