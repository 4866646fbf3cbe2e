"""Compressed Transformer: encoders and decoders that attend to a short form of the text; Linformer, Performer, others.

It differs from BERT and RoBERTa only in the attention, which the config's `mechanism` chooses for all layers or for
each: mechanisms of this folder, and `pattern`, the softmax attention of the sparse Transformer. Inputs may be padded on
either side, have masked tokens between others, and hold packed documents: a mechanism that follows no pattern gets each
sequence from its first token on, with padding only at the end (`sequences.py`).

Sources: Wang et al., "Linformer" (arXiv:2006.04768); Katharopoulos et al., "Transformers are RNNs" (arXiv:2006.16236);
Choromanski et al., "Rethinking Attention with Performers" (arXiv:2009.14794); Xiong et al., "Nyströmformer"
(arXiv:2102.03902); Liu et al., "Generating Wikipedia by Summarizing Long Sequences" (arXiv:1801.10198); and the sources
in the files of the mechanisms.
"""

from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin

from hf_efficient_attn.integration.forward_context import CACHE_ARGUMENT
from hf_efficient_attn.integration.unsupported import refuse_paged
from hf_efficient_attn.models.base import EfficientPreTrainedModel
from hf_efficient_attn.models.heads.outputs import BackboneOutput
from hf_efficient_attn.models.heads.task_heads import (
    CausalLMHead,
    MaskedLMHead,
    MultipleChoiceHead,
    QuestionAnsweringHead,
    SequenceClassificationHead,
    TokenClassificationHead,
)
from hf_efficient_attn.models.mechanisms.linear import LinearAttention, PositiveRandomFeatures
from hf_efficient_attn.models.mechanisms.prior import PriorAttention
from hf_efficient_attn.models.mechanisms.sequences import MechanismAttention, find_sequences, without_padding
from hf_efficient_attn.models.mechanisms.state_cache import StateLayer, attach_states
from hf_efficient_attn.models.parts.blocks import build_norm
from hf_efficient_attn.models.parts.embeddings import EmbeddingSum
from hf_efficient_attn.models.prologue import TableGeneration, backbone_forward
from hf_efficient_attn.models.sparse.attention import SparseAttention, SparseLayer
from hf_efficient_attn.models.sparse.inputs import without_globals

from .configuration_compressed_transformer import CompressedTransformerConfig
from .linformer import LengthMaps, LinformerAttention
from .mechanism import PassedStates, PassingAttention
from .memory_compressed import MemoryCompressedAttention, SlotLayer
from .nystrom import NystromAttention
from .softmax_heads import (
    CollaborativeHeadsAttention,
    ResidualScoresAttention,
    ReusedWeightsAttention,
    TalkingHeadsAttention,
)

ATTENTIONS: dict[str, type[nn.Module]] = {
    "linformer": LinformerAttention,
    "linear": LinearAttention,
    "nystrom": NystromAttention,
    "memory_compressed": MemoryCompressedAttention,
    "pattern": PassingAttention,
    "prior": PriorAttention,
    "residual_scores": ResidualScoresAttention,
    "reused_weights": ReusedWeightsAttention,
    "talking_heads": TalkingHeadsAttention,
    "collaborative_heads": CollaborativeHeadsAttention,
}


class CompressedLayer(SparseLayer):
    """One block with the attention of its mechanism. Shapes: [B, T, hidden_size] → the same."""

    def __init__(self, config: CompressedTransformerConfig, layer_idx: int) -> None:
        attention = ATTENTIONS[config.mechanism_of_layer(layer_idx)](config, layer_idx)
        super().__init__(config, layer_idx, config.gated_mlp, attention)


class CompressedTransformerPreTrainedModel(EfficientPreTrainedModel):
    """Weight initialisation, loading checks and capabilities shared by the backbone and its heads."""

    config_class = CompressedTransformerConfig
    config: CompressedTransformerConfig
    base_model_prefix = "model"
    model_tags = ["efficient-attention", "compressed-transformer", "hf_efficient_attn"]
    extra_inputs = ("token_type_ids",)
    _no_split_modules = ["CompressedLayer"]
    _can_record_outputs = {"hidden_states": CompressedLayer, "attentions": [MechanismAttention, SparseAttention]}

    def __init__(self, config: CompressedTransformerConfig) -> None:
        super().__init__(config)
        self.uncached = None if config.is_causal else "A bidirectional compressed Transformer"
        # transformers then refuses assistant models, which remove tokens from the cache
        self._is_stateful = bool(config.layers_with("linear") or config.layers_with("memory_compressed"))

    def redraw_features(self, number: int) -> None:
        """Replace the random features of all layers by draw `number` (first 0), which is the same in all processes."""
        for module in self.modules():
            if isinstance(module, PositiveRandomFeatures):
                module.redraw(number)


class CompressedTransformerModel(CompressedTransformerPreTrainedModel):
    """The backbone: embeddings, blocks, final norm. Shapes: input_ids [B, T] → [B, T, hidden_size]."""

    def __init__(self, config: CompressedTransformerConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.embeddings = EmbeddingSum(config, num_types=config.type_vocab_size)
        linformers = config.layers_with("linformer")
        self.shared_maps = None
        if linformers and config.projection_sharing == "layerwise":
            self.shared_maps = LengthMaps(config, config.slots_of_layer(linformers[0]))
        self.layers = nn.ModuleList(CompressedLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = build_norm(config) if config.norm_position == "pre" else nn.Identity()
        # a causal language model may put the transform of its head here
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
        **kwargs: Any,
    ) -> BackboneOutput:
        """Return the last hidden state and, with `use_cache` in a causal model, the cache.

        For the arguments see `prepare`; an attention matrix only leaves out padding and, in a causal model, later
        tokens.
        """
        self.check_call(cache)
        cache, read = self.cache_of(cache, use_cache), (attention_mask, position_ids, token_type_ids)
        given = (input_ids, attention_mask, position_ids, inputs_embeds, kwargs, cache)
        call = self.prepare(*given, read_on_host=read)
        hidden_states, where = self.embeddings(call, token_type_ids)
        masks, passed = call.masks(self.config), PassedStates()
        sequences = find_sequences(call, masks, self.config.is_causal)
        if self.config.projection_padding == "ignore":
            is_packed = call.documents is not None or masks.token_mask.segment_ids is not None
            hidden_states = without_padding(hidden_states, call.real_tokens, is_packed)
        # each mechanism uses some of these
        kwargs |= {**where, "inputs": without_globals(masks), "sequences": sequences, "passed_states": passed}
        kwargs["shared_maps"] = None if self.shared_maps is None else self.shared_maps()
        for layer in islice(self.layers, self.config.num_hidden_layers):
            hidden_states = layer(hidden_states, cache=cache, **kwargs)
        passed.check_gradients()
        return BackboneOutput(self.transform(self.norm(hidden_states)), **{CACHE_ARGUMENT: cache})

    def cache_of(self, cache: Cache | None, use_cache: bool | None) -> Cache | None:
        """Return the cache of a call, with a state for each layer of the model that has one."""
        refuse_paged(cache)
        if cache is None and use_cache and self.config.is_causal:
            cache = DynamicCache(config=self.config)
        if cache is not None:
            slots = partial(SlotLayer, self.config.compression_tokens)
            stateful = dict.fromkeys(self.config.layers_with("memory_compressed"), slots)
            stateful |= dict.fromkeys(self.config.layers_with("linear"), StateLayer)
            attach_states(cache, self.config.num_hidden_layers, stateful)
        return cache


class CompressedTransformerForCausalLM(
    TableGeneration, CausalLMHead, CompressedTransformerPreTrainedModel, GenerationMixin
):
    backbone_class = CompressedTransformerModel


class CompressedTransformerForMaskedLM(MaskedLMHead, CompressedTransformerPreTrainedModel):
    backbone_class = CompressedTransformerModel


class CompressedTransformerForSequenceClassification(SequenceClassificationHead, CompressedTransformerPreTrainedModel):
    backbone_class = CompressedTransformerModel


class CompressedTransformerForTokenClassification(TokenClassificationHead, CompressedTransformerPreTrainedModel):
    backbone_class = CompressedTransformerModel


class CompressedTransformerForQuestionAnswering(QuestionAnsweringHead, CompressedTransformerPreTrainedModel):
    backbone_class = CompressedTransformerModel


class CompressedTransformerForMultipleChoice(MultipleChoiceHead, CompressedTransformerPreTrainedModel):
    backbone_class = CompressedTransformerModel


__all__ = [
    "CompressedTransformerForCausalLM",
    "CompressedTransformerForMaskedLM",
    "CompressedTransformerForMultipleChoice",
    "CompressedTransformerForQuestionAnswering",
    "CompressedTransformerForSequenceClassification",
    "CompressedTransformerForTokenClassification",
    "CompressedTransformerModel",
    "CompressedTransformerPreTrainedModel",
]
