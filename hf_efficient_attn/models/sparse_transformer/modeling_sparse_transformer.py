"""Sparse Transformer: an encoder or causal decoder whose layers follow patterns, such as Longformer and BigBird.

It differs from BERT, RoBERTa or a pre-norm language model only in the keys that a layer attends to. The config's
`attention_pattern` and `global_tokens` select them, and `SparseAttention` computes the attention. Inputs may have any
length; nothing has to be padded to windows or blocks, and every output is as long as the input.

Sources: Beltagy et al., "Longformer" (arXiv:2004.05150); Zaheer et al., "BigBird" (arXiv:2007.14062). Neither paper has
the causal forms.
"""

from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin

from hf_efficient_attn.attention.sharded.shards import shards_of
from hf_efficient_attn.integration.forward_context import CACHE_ARGUMENT
from hf_efficient_attn.models.base import SparsePreTrainedModel
from hf_efficient_attn.models.heads.outputs import BackboneOutput
from hf_efficient_attn.models.heads.task_heads import (
    CausalLMHead,
    MaskedLMHead,
    MultipleChoiceHead,
    QuestionAnsweringHead,
    SequenceClassificationHead,
    TokenClassificationHead,
)
from hf_efficient_attn.models.parts.blocks import build_norm
from hf_efficient_attn.models.parts.embeddings import EmbeddingSum
from hf_efficient_attn.models.prologue import TableGeneration, backbone_forward
from hf_efficient_attn.models.sparse.attention import SparseAttention, SparseLayer, check_packing
from hf_efficient_attn.models.sparse.inputs import extend_global_mask, global_inputs, looked_at

from .configuration_sparse_transformer import SparseTransformerConfig


class SparseTransformerPreTrainedModel(SparsePreTrainedModel):
    """Weight initialisation, loading checks and capabilities shared by the backbone and its heads."""

    config_class = SparseTransformerConfig
    config: SparseTransformerConfig
    base_model_prefix = "model"
    model_tags = ["efficient-attention", "sparse-transformer", "hf_efficient_attn"]
    extra_inputs = ("token_type_ids", "global_attention_mask")
    _no_split_modules = ["SparseLayer"]
    _can_record_outputs = {"hidden_states": SparseLayer, "attentions": SparseAttention}


class SparseTransformerModel(SparseTransformerPreTrainedModel):
    """The backbone: embeddings, blocks, final norm. Shapes: input_ids [B, T] → [B, T, hidden_size]."""

    def __init__(self, config: SparseTransformerConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.embeddings = EmbeddingSum(config, num_types=config.type_vocab_size)
        layers = range(config.num_hidden_layers)
        self.layers = nn.ModuleList(SparseLayer(config, index, config.gated_mlp) for index in layers)
        self.norm = build_norm(config) if config.norm_position == "pre" else nn.Identity()
        # a causal language model may put here the map before its projection to the vocabulary
        self.transform = nn.Identity()
        self.gradient_checkpointing = False
        self.post_init()

    @backbone_forward
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        token_type_ids: torch.LongTensor | None = None,
        global_attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> BackboneOutput:
        """Return the last hidden state and, with `use_cache` in a causal model, the cache.

        Args:
            attention_mask, position_ids: see `prepare`.
            global_attention_mask: 1 = attends to all tokens and is attended to by all, [B, K] over cached and new
                tokens; instead of the config's `global_tokens`.
        """
        rule_ids = looked_at(self.config, self.task, input_ids)
        read = (rule_ids, attention_mask, position_ids, global_attention_mask, token_type_ids)
        given = (input_ids, attention_mask, position_ids, inputs_embeds, kwargs, cache, use_cache)
        call = self.prepare(*given, read_on_host=read)
        check_packing(self.config.full_attention_up_to, call.documents, call.tokens)
        given = (call, call.masks(self.config), input_ids, global_attention_mask, shards_of(self))
        inputs = global_inputs(self.config, self.task, *given)
        hidden_states, where = self.embeddings(call, token_type_ids)
        for layer in islice(self.layers, self.config.num_hidden_layers):
            hidden_states = layer(hidden_states, inputs=inputs, cache=call.cache, **where, **kwargs)
        return BackboneOutput(self.transform(self.norm(hidden_states)), **{CACHE_ARGUMENT: call.cache})


class SparseTransformerForCausalLM(TableGeneration, CausalLMHead, SparseTransformerPreTrainedModel, GenerationMixin):
    backbone_class = SparseTransformerModel

    def prepare_inputs_for_generation(
        self,
        input_ids: torch.LongTensor,
        *args: Any,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Do as transformers; `global_attention_mask` covers the whole text, cached tokens included."""
        chosen = extend_global_mask(
            self.config, input_ids, attention_mask, inputs_embeds, kwargs.pop("global_attention_mask", None)
        )
        masks = {"attention_mask": attention_mask, "global_attention_mask": chosen}
        return super().prepare_inputs_for_generation(input_ids, *args, inputs_embeds=inputs_embeds, **masks, **kwargs)


class SparseTransformerForMaskedLM(MaskedLMHead, SparseTransformerPreTrainedModel):
    backbone_class = SparseTransformerModel


class SparseTransformerForSequenceClassification(SequenceClassificationHead, SparseTransformerPreTrainedModel):
    backbone_class = SparseTransformerModel


class SparseTransformerForTokenClassification(TokenClassificationHead, SparseTransformerPreTrainedModel):
    backbone_class = SparseTransformerModel


class SparseTransformerForQuestionAnswering(QuestionAnsweringHead, SparseTransformerPreTrainedModel):
    backbone_class = SparseTransformerModel


class SparseTransformerForMultipleChoice(MultipleChoiceHead, SparseTransformerPreTrainedModel):
    backbone_class = SparseTransformerModel


__all__ = [
    "SparseTransformerForCausalLM",
    "SparseTransformerForMaskedLM",
    "SparseTransformerForMultipleChoice",
    "SparseTransformerForQuestionAnswering",
    "SparseTransformerForSequenceClassification",
    "SparseTransformerForTokenClassification",
    "SparseTransformerModel",
    "SparseTransformerPreTrainedModel",
]
