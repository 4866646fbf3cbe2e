"""Transformer with routing heads, which attend within clusters (k-means of queries and keys), and local heads.

Queries and keys of a routing head are normalized to one sphere (mean 0, norm √D, without scale and bias), so the
nearest centroid is the one with the largest product, and tokens near the same centroid have large products with each
other. A token attends to the tokens of its clusters; heads that do not route follow the config's `attention_pattern`.

In causal models, the authors' choice of tokens (`membership="balanced"`) leaks information about later tokens. A
cluster has the w tokens of the whole text that are most similar to its centroid, so later tokens decide whether a token
is in a cluster, and with which others. No token attends to later values, but training uses a choice that generation
cannot make: generation chooses among the tokens so far, and the outputs of earlier tokens stay as they were. Outputs
with a cache therefore differ from those of the full forward pass. `membership="causal"`, the default of causal models,
has no such leak: the cluster of a token depends on this token alone, the token attends to the last w members of its
cluster, and cached generation equals the full forward pass.

Source: Roy, Saffar, Vaswani, Grangier (arXiv:2003.05997), sections 3 and 4, and, where the paper is silent, the
authors' code: scores of normalized vectors are not scaled, a token in several clusters gets the sum of their outputs
divided by their number plus 0.01, and layers are post-norm. We differ in these points: padding takes no place in a
cluster, and packed documents have their own members; the centroids have other initial values and moving averages
(`clusters.py`), and queries and keys update them together, in one step; relative positions have vectors for keys only;
and routing heads that share queries and keys have no key projection, which is unused in the authors' code.
"""

from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin

from hf_efficient_attn.attention.layer import readable_keys
from hf_efficient_attn.layout.token_locations import token_locations
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.models.base import EfficientPreTrainedModel
from hf_efficient_attn.models.heads.outputs import BackboneOutput, expect_use
from hf_efficient_attn.models.heads.task_heads import (
    CausalLMHead,
    MaskedLMHead,
    MultipleChoiceHead,
    QuestionAnsweringHead,
    SequenceClassificationHead,
    TokenClassificationHead,
)
from hf_efficient_attn.models.inputs import LayerInputs
from hf_efficient_attn.models.parts.blocks import Block, build_norm
from hf_efficient_attn.models.parts.embeddings import Positions, TokenEmbedding
from hf_efficient_attn.models.prologue import PreparedCall, TableGeneration, backbone_forward

from .attention import RoutingAttention, RoutingInputs
from .clusters import Centroids, Seen, update_all
from .configuration_routing_transformer import RoutingTransformerConfig


def routing_inputs(call: PreparedCall, masks: LayerInputs) -> RoutingInputs:
    """Return the inputs of the layers for a call."""
    tokens, matrix, device = masks.token_mask, masks.matrix, call.embedded.device
    num_keys = call.num_keys
    if matrix is not None:
        tokens, num_keys = TokenMask(readable_keys(matrix, call.batch_size)), matrix.shape[3]
    first = masks.query_offset
    first = num_keys - call.tokens if first is None else first
    documents = token_locations(tokens, num_keys, device).documents
    positions = first + torch.arange(call.tokens, device=device)
    return RoutingInputs(masks.token_mask, masks.query_offset, matrix, documents, positions)


class RoutingLayer(Block):
    """One block. [B, T, hidden_size] → the same, and in training the fields of `Seen`."""

    def __init__(self, config: RoutingTransformerConfig, layer_idx: int) -> None:
        super().__init__(config, RoutingAttention(config, layer_idx), config.gated_mlp)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor | None, ...]:
        attended, _, shown = self.self_attn(self.before(hidden_states, self.attention_norm), **kwargs)
        return self.feed(self.after(hidden_states, attended, self.attention_norm)), *shown


class RoutingTransformerPreTrainedModel(EfficientPreTrainedModel):
    """Weight initialisation, loading checks and capabilities shared by the backbone and its heads."""

    config_class = RoutingTransformerConfig
    config: RoutingTransformerConfig
    base_model_prefix = "model"
    model_tags = ["efficient-attention", "routing-transformer", "hf_efficient_attn"]
    _no_split_modules = ["RoutingLayer"]
    _can_record_outputs = {"hidden_states": RoutingLayer, "attentions": RoutingAttention}
    _keep_in_fp32_modules_strict = ["centroids"]

    @classmethod
    def maybe_distribute_model(cls, model: Any, distributed_config: Any, *args: Any, **kwargs: Any) -> Any:
        """Distribute the model; centroids count a batch once, even if tensor parallelism gives it to many processes."""
        for module in model.modules():
            if isinstance(module, Centroids):
                module.num_copies = getattr(distributed_config, "tp_size", None) or 1
        return super().maybe_distribute_model(model, distributed_config, *args, **kwargs)


class RoutingTransformerModel(RoutingTransformerPreTrainedModel):
    """The backbone: embedding, blocks and, if pre-norm, a last norm. Shapes: input_ids [B, T] → [B, T, hidden_size]."""

    def __init__(self, config: RoutingTransformerConfig) -> None:
        super().__init__(config)
        self.embed_tokens = TokenEmbedding(config)
        self.positions = Positions(config)
        self.dropout = nn.Dropout(config.embedding_dropout)
        self.layers = nn.ModuleList(RoutingLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = build_norm(config) if config.norm_position == "pre" else nn.Identity()
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
        **kwargs: Any,
    ) -> BackboneOutput:
        """Return the last hidden state, the cache with `use_cache`, and in training the centroids' `auxiliary_loss`.

        In training this moves the centroids, see `clusters.py`. For `attention_mask` and `position_ids` see `prepare`.
        """
        call = self.prepare(input_ids, attention_mask, position_ids, inputs_embeds, kwargs, cache, use_cache)
        hidden_states, where = self.positions(call.embedded, call)
        hidden_states, shown = self.dropout(hidden_states), {}
        kwargs |= {**where, "inputs": routing_inputs(call, call.masks(self.config)), "cache": call.cache}
        for layer in islice(self.layers, self.config.num_hidden_layers):
            centroids = layer.self_attn.centroids
            # a copy, because `_learn` moves the centroids before gradient checkpointing recomputes the layer
            means = centroids.means.clone() if self.training and centroids is not None else None
            # not nested: reentrant checkpointing does not differentiate tensors in nested tuples
            hidden_states, *seen = layer(hidden_states, means=means, **kwargs)
            if seen:
                shown[layer.self_attn] = Seen(*seen)
        states = self.norm(hidden_states)
        return BackboneOutput(states, call.cache, auxiliary_loss=self._learn(shown, states))

    def _learn(self, shown: dict[RoutingAttention, Seen], states: Tensor) -> Tensor | None:
        """Move the centroids towards what they have seen, and return the commitment loss; None: they have seen nothing.

        The centroids of a layer stay where they are if its query projection is not trained.
        """
        if not shown:
            return None
        if torch.is_grad_enabled():
            trained = {layer: seen for layer, seen in shown.items() if layer.q_proj.weight.requires_grad}
            if len(trained) > 0:
                update_all([layer.centroids for layer in trained], list(trained.values()))
        distances = [seen.distance for seen in shown.values()]
        total: Tensor = torch.stack([distance.to(distances[0].device) for distance in distances]).sum()
        weight = self.config.commitment_weight
        return expect_use(weight * total, states, weight)


class RoutingTransformerForCausalLM(TableGeneration, CausalLMHead, RoutingTransformerPreTrainedModel, GenerationMixin):
    backbone_class = RoutingTransformerModel


class RoutingTransformerForMaskedLM(MaskedLMHead, RoutingTransformerPreTrainedModel):
    backbone_class = RoutingTransformerModel


class RoutingTransformerForSequenceClassification(SequenceClassificationHead, RoutingTransformerPreTrainedModel):
    backbone_class = RoutingTransformerModel


class RoutingTransformerForTokenClassification(TokenClassificationHead, RoutingTransformerPreTrainedModel):
    backbone_class = RoutingTransformerModel


class RoutingTransformerForQuestionAnswering(QuestionAnsweringHead, RoutingTransformerPreTrainedModel):
    backbone_class = RoutingTransformerModel


class RoutingTransformerForMultipleChoice(MultipleChoiceHead, RoutingTransformerPreTrainedModel):
    backbone_class = RoutingTransformerModel


__all__ = [
    "RoutingTransformerForCausalLM",
    "RoutingTransformerForMaskedLM",
    "RoutingTransformerForMultipleChoice",
    "RoutingTransformerForQuestionAnswering",
    "RoutingTransformerForSequenceClassification",
    "RoutingTransformerForTokenClassification",
    "RoutingTransformerModel",
    "RoutingTransformerPreTrainedModel",
]
