"""Transformer whose heads learn how far they attend: fixed, adaptive and dynamic attention span.

A head with span z attends to the S keys before a query (without the query itself, unless `include_self`) through a soft
mask that is 1 up to z and falls to 0 over R more tokens; keys beyond are not computed. The score of query t and key r
is q_t·(k_r + p_{t−r}) / √D with one table p for all heads and layers, or it uses rotary positions. Texts longer than a
training step are split into segments. Each segment also attends to the inputs that the layers kept of the previous one.

Source: Sukhbaatar et al., "Adaptive Attention Span in Transformers" (arXiv:1905.07799), sections 2 and 3. For points
that the paper leaves open, we follow what its code is known to compute: scores are scaled, layers are post-norm, and
the distance to the nearest key counts as 0. We differ in two points. Each head computes its own span, not the longest
span of its layer. And no query attends beyond the start of a text, where queries of the authors' code attend to zeros,
which take a share of the softmax. The paper does not say over what the penalty of dynamic spans is averaged; here it is
averaged over the real tokens of the batch.
"""

from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin

from hf_efficient_attn.attention.explanation import LayerRequest
from hf_efficient_attn.attention.sharded.shards import shards_of
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
from hf_efficient_attn.models.parts.attention import MultiHeadAttention
from hf_efficient_attn.models.parts.blocks import Block, append_to_cache, build_norm
from hf_efficient_attn.models.parts.embeddings import Positions, TokenEmbedding, rotate_both, rotate_last
from hf_efficient_attn.models.prologue import PreparedCall, TableGeneration, backbone_forward
from hf_efficient_attn.models.spans.attention import (
    ALL_TOKENS,
    SpanInputs,
    attend_spans,
    span_inputs,
    span_request,
    within_reach,
)
from hf_efficient_attn.models.spans.config import checked_window
from hf_efficient_attn.models.spans.memory import Segment, SegmentMemory, SpanGeneration, check_segment
from hf_efficient_attn.models.spans.module import DYNAMIC, Spans, all_bounds, layer_bounds
from hf_efficient_attn.models.spans.training import SpanCheckpoints, fit_rows, mean_span, span_penalty

from .configuration_adaptive_span import AdaptiveSpanConfig

# The authors' relative positions: one table of vectors, added to the keys, for all heads and layers.


class DistanceTable(nn.Module):
    """A vector per distance, [limit, head_dim], the nearest key first, initialized with N(0, 1) as the authors do."""

    def __init__(self, config: AdaptiveSpanConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(config.span_limit, config.head_dim))

    def initialize(self) -> None:
        init.normal_(self.weight)

    def forward(self) -> Tensor:
        """Return the table."""
        return self.weight

    def set_distances(self, num_distances: int) -> None:
        """Change the number of distances; new ones are initialised as the others were."""
        self.weight = nn.Parameter(fit_rows(self.weight.data, num_distances))


class SpanAttention(MultiHeadAttention):
    """Multi-head attention with a span per head. [B, T, hidden_size] → the same, weights or None, and the mean span."""

    def __init__(self, config: AdaptiveSpanConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.make_maps()
        self.spans = Spans(config, layer_idx)

    def forward(
        self,
        hidden_states: Tensor,
        inputs: SpanInputs = ALL_TOKENS,
        memory: Tensor | None = None,
        position_table: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the output, the weights [B, H, T, K] with `output_attentions`, and the mean span of the heads.

        Args:
            memory: inputs of this layer for earlier tokens, [B, C, hidden_size].
            position_table: [limit, D], a vector per distance.
            position_embeddings: cosines and sines of the positions of all keys; if there are more, the last ones are
                used.
        """
        spans, window = self.spans(hidden_states), checked_window(self.config, self.spans)
        own_bounds = layer_bounds(self.spans, spans, inputs.bounds)
        need_weights = self.needs_weights(kwargs)
        read = hidden_states
        if memory is not None:
            memory = memory if need_weights else within_reach(memory, own_bounds, self.spans.kind == DYNAMIC, window)
            read = torch.cat((memory.to(hidden_states), hidden_states), 1)
        query, key, value = (
            self.heads(each) for each in (self.q_proj(hidden_states), self.k_proj(read), self.v_proj(read))
        )
        if position_embeddings is not None and memory is None:
            query, key = rotate_both(query, key, *position_embeddings)
        elif position_embeddings is not None:
            query, key = (rotate_last(each, position_embeddings) for each in (query, key))
        if cache is not None:
            key, value = append_to_cache(cache, key, value, self.layer_idx)
        options = {**self.engine_options(inputs, kwargs), "bounds": own_bounds, "layer_idx": self.layer_idx}
        options |= {"position_table": position_table, "shards": shards_of(self)}
        token_mask = options.pop("tokens")
        out, weights = attend_spans(query, key, value, spans, window, token_mask, self.scaling, **options)
        self.spans.note(spans, inputs.real_tokens)
        return self.o_proj(out.flatten(2)), weights, mean_span(spans, inputs.real_tokens, self.spans.shards)

    def layer_request(self, num_keys: int, task: str | None) -> LayerRequest:
        """Return the request of this layer to the engine for this number of tokens."""
        return span_request(self, self.spans, num_keys, self.config.position_embedding_type == "relative_keys")


class AdaptiveSpanLayer(Block):
    """One block, post-norm (the authors') or pre-norm. [B, T, hidden_size] → the same, and the mean span."""

    def __init__(self, config: AdaptiveSpanConfig, layer_idx: int) -> None:
        super().__init__(config, SpanAttention(config, layer_idx), config.gated_mlp)

    def forward(
        self, hidden_states: Tensor, memory: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        memory = None if memory is None else self.before(memory, self.attention_norm)
        read = self.before(hidden_states, self.attention_norm)
        attended, _, span = self.self_attn(read, memory=memory, **kwargs)
        return self.feed(self.after(hidden_states, attended, self.attention_norm)), span


class AdaptiveSpanPreTrainedModel(SpanCheckpoints, EfficientPreTrainedModel):
    """Weight initialisation, loading checks and capabilities shared by the backbone and its heads."""

    config_class = AdaptiveSpanConfig
    config: AdaptiveSpanConfig
    base_model_prefix = "model"
    model_tags = ["efficient-attention", "adaptive-span", "hf_efficient_attn"]
    extra_inputs = ("segment_index",)
    _no_split_modules = ["AdaptiveSpanLayer"]
    _can_record_outputs = {"hidden_states": AdaptiveSpanLayer, "attentions": SpanAttention}
    _keep_in_fp32_modules_strict = ["spans"]

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if self.config.matrix_init == "uniform" and isinstance(module, nn.Linear):
            limit = module.in_features**-0.5
            init.uniform_(module.weight, -limit, limit)
            if module.bias is not None:
                init.uniform_(module.bias, -limit, limit)

    def reset_memory(self) -> None:
        """Clear the memory of earlier segments."""
        self.base_model.memory.clear()


class AdaptiveSpanModel(AdaptiveSpanPreTrainedModel):
    """The backbone: embedding, blocks and, if pre-norm, a final norm. input_ids [B, T] → [B, T, hidden_size]."""

    def __init__(self, config: AdaptiveSpanConfig) -> None:
        super().__init__(config)
        self.embed_tokens = TokenEmbedding(config)
        self.positions = Positions(config)
        self.dropout = nn.Dropout(config.embedding_dropout)
        self.distances = DistanceTable(config) if config.position_embedding_type == "relative_keys" else None
        self.layers = nn.ModuleList(AdaptiveSpanLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = build_norm(config) if config.norm_position == "pre" else nn.Identity()
        self.memory = SegmentMemory()
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
        segment_index: Tensor | None = None,
        **kwargs: Any,
    ) -> BackboneOutput:
        """Return the last hidden state, the cache with `use_cache`, and in training the spans' `auxiliary_loss`.

        Args:
            attention_mask, position_ids: see `prepare`.
            segment_index: int [B], the index of this segment in the text of its row. The layers then also attend to
                the states that they kept of the previous segment, which must be the input of the previous call.
                Training and evaluation have separate memories. None: the input is a separate text.
        """
        modules = (layer.self_attn.spans for layer in self.layers)
        bounds = all_bounds(self, modules, attention_mask, position_ids, segment_index)
        use_cache = use_cache and segment_index is None
        call = self.prepare(input_ids, attention_mask, position_ids, inputs_embeds, kwargs, cache, use_cache)
        segment = None
        if segment_index is not None:
            given = {**kwargs, "position_ids": position_ids, "cache": cache}
            check_segment(segment_index, call.batch_size, attention_mask, given)
            segment = self.memory.open(segment_index, self.training, len(self.layers))
        hidden_states, where = self._place(call, segment)
        kwargs |= {**where, "inputs": span_inputs(call, self, bounds), "cache": call.cache}
        spans = []
        for layer in islice(self.layers, self.config.num_hidden_layers):
            memory = None if segment is None else segment.read(hidden_states)
            hidden_states, span = layer(hidden_states, memory=memory, **kwargs)
            spans.append(span)
        if segment is not None:
            self.memory.close(segment, self, bounds)
        states = self.norm(hidden_states)
        return BackboneOutput(states, call.cache, auxiliary_loss=span_penalty(self, spans, states))

    def _place(self, call: PreparedCall, segment: Segment | None) -> tuple[Tensor, dict[str, Any]]:
        """Return the hidden states before the first layer, and the position arguments of attention."""
        if segment is not None:
            call = replace(call, position_ids=segment.position_ids(call.embedded))
        hidden_states, where = self.positions(call.embedded, call)
        if self.distances is not None:
            where["position_table"] = self.distances()
        return self.dropout(hidden_states), where


class AdaptiveSpanForCausalLM(
    SpanGeneration, TableGeneration, CausalLMHead, AdaptiveSpanPreTrainedModel, GenerationMixin
):
    backbone_class = AdaptiveSpanModel


class AdaptiveSpanForMaskedLM(MaskedLMHead, AdaptiveSpanPreTrainedModel):
    backbone_class = AdaptiveSpanModel


class AdaptiveSpanForSequenceClassification(SequenceClassificationHead, AdaptiveSpanPreTrainedModel):
    backbone_class = AdaptiveSpanModel


class AdaptiveSpanForTokenClassification(TokenClassificationHead, AdaptiveSpanPreTrainedModel):
    backbone_class = AdaptiveSpanModel


class AdaptiveSpanForQuestionAnswering(QuestionAnsweringHead, AdaptiveSpanPreTrainedModel):
    backbone_class = AdaptiveSpanModel


class AdaptiveSpanForMultipleChoice(MultipleChoiceHead, AdaptiveSpanPreTrainedModel):
    backbone_class = AdaptiveSpanModel


__all__ = [
    "AdaptiveSpanForCausalLM",
    "AdaptiveSpanForMaskedLM",
    "AdaptiveSpanForMultipleChoice",
    "AdaptiveSpanForQuestionAnswering",
    "AdaptiveSpanForSequenceClassification",
    "AdaptiveSpanForTokenClassification",
    "AdaptiveSpanModel",
    "AdaptiveSpanPreTrainedModel",
]
