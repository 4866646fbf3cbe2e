"""Simplified Transformer: Pre-LN, parallel, V-SkipInit, SAS, SAS-P and norm-free SAS-P in one family.

With U = Norm(X), head h of shaped attention returns (α_h·I + β_h·A_h − γ_h·C)·V_h, where A is the softmax matrix, C its
value at zero logits and V_h head h's slice of U·W^V. SAS drops W^V (except in the first layer), W^P and the attention
skip; SAS-P also computes the MLP in parallel to attention and drops the last skip. The matrix is never formed: α·V +
β·A·V − γ·C·V is an attention function of transformers plus a running mean (`attention.py`).

Source: He & Hofmann, "Simplifying Transformer Blocks" (arXiv:2311.01906), equations 1-7, 12 and 13. Where the text is
silent, this follows the authors' code: W^Q starts at 0, W^V of layer 1 is kept, norm-free SAS-P keeps a norm before
block 1 and after the last. Where we differ: C is renormalised under padding and packing, and under an
`attention_pattern` it is over the keys that A reads; attention dropout acts on the softmax weights A alone (theirs on
the whole shaped matrix); RMSNorm adds its epsilon under the root.
"""

from itertools import islice
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from hf_efficient_attn.attention.cache_argument import is_paged, takes_cache
from hf_efficient_attn.attention.overridden import refuse_overridden
from hf_efficient_attn.attention.processes import compare_processes
from hf_efficient_attn.attention.sharded.sequence_shards import shards_of
from hf_efficient_attn.models.base import FamilyPreTrainedModel
from hf_efficient_attn.models.heads.outputs import BackboneOutput
from hf_efficient_attn.models.heads.task_heads import (
    CausalLMHead,
    MaskedLMHead,
    MultipleChoiceHead,
    QuestionAnsweringHead,
    SequenceClassificationHead,
    TokenClassificationHead,
)
from hf_efficient_attn.models.inputs.axes import check_axes
from hf_efficient_attn.models.parts.blocks import MLP, build_norm
from hf_efficient_attn.models.parts.positions import Positions
from hf_efficient_attn.models.prologue import prepare_call
from hf_efficient_attn.models.spans.bounds import all_bounds
from hf_efficient_attn.models.spans.cache import SpanGeneration
from hf_efficient_attn.models.spans.checkpoints import SpanCheckpoints
from hf_efficient_attn.models.spans.penalty import span_penalty

from .attention import SimplifiedTransformerAttention
from .checks import BlockChecks, check_implementation
from .configuration_simplified_transformer import SimplifiedTransformerConfig
from .masks import MaskGeneration, block_masks
from .projections import Gain


class SimplifiedTransformerLayer(GradientCheckpointingLayer):
    """One block, sequential or parallel, with the skips its config asks for. [B, T, hidden_size] → same, mean span."""

    def __init__(self, config: SimplifiedTransformerConfig, layer_idx: int) -> None:
        super().__init__()
        self.is_parallel, is_normalized = config.style.parallel, config.style.normalized
        self.input_layernorm = build_norm(config) if is_normalized or layer_idx == 0 else nn.Identity()
        self.self_attn = SimplifiedTransformerAttention(config, layer_idx)
        self.mlp = MLP(config, config.gated_mlp, config.mlp_output_init_std)
        self.dropout = nn.Dropout(config.hidden_dropout)
        self.attention_gain = Gain(config, "attention_gain", layer_idx)
        self.mlp_gain = Gain(config, "mlp_gain", layer_idx)
        if self.is_parallel:
            self.combined_skip_gain = Gain(config, "combined_skip_gain", layer_idx)
        else:
            self.attention_skip_gain = Gain(config, "attention_skip_gain", layer_idx)
            self.mlp_skip_gain = Gain(config, "mlp_skip_gain", layer_idx)
            self.post_attention_layernorm = build_norm(config) if is_normalized else nn.Identity()

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        normed = self.input_layernorm(hidden_states)
        attended, _, span = self.self_attn(normed, **kwargs)
        attended = self.attention_gain(self.dropout(attended))
        if self.is_parallel:
            out = self.mlp_gain(self.dropout(self.mlp(normed)), onto=attended)
            return self.combined_skip_gain(hidden_states, onto=out), span
        hidden_states = self.attention_skip_gain(hidden_states, onto=attended)
        out = self.mlp_gain(self.dropout(self.mlp(self.post_attention_layernorm(hidden_states))))
        return self.mlp_skip_gain(hidden_states, onto=out), span


class SimplifiedTransformerPreTrainedModel(SpanCheckpoints, BlockChecks, FamilyPreTrainedModel):
    """Weight initialisation, loading checks and capabilities shared by the backbone and its heads."""

    config_class = SimplifiedTransformerConfig
    config: SimplifiedTransformerConfig
    base_model_prefix = "model"
    model_tags = ["efficient-attention", "simplified-transformer", "hf_efficient_attn"]
    _no_split_modules = ["SimplifiedTransformerLayer"]
    _supports_flash_attn = True
    _supports_attention_backend = True
    _can_record_outputs = {"hidden_states": SimplifiedTransformerLayer, "attentions": SimplifiedTransformerAttention}

    def __init__(self, config: SimplifiedTransformerConfig) -> None:
        super().__init__(config)
        if config.span is not None:
            self._keep_in_fp32_modules_strict = {"spans"}


class SimplifiedTransformerModel(SimplifiedTransformerPreTrainedModel):
    """The backbone: embedding, positions, blocks, final norm. Shapes: input_ids [B, T] → [B, T, hidden_size]."""

    def __init__(self, config: SimplifiedTransformerConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.positions = Positions(config)
        self.dropout = nn.Dropout(config.embedding_dropout)
        self.layers = nn.ModuleList(SimplifiedTransformerLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = build_norm(config, kind=config.final_norm_type)
        self.gradient_checkpointing = False
        self.post_init()

    @takes_cache
    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BackboneOutput:
        """Return the last hidden state, the cache with `use_cache`, and in training the spans' `auxiliary_loss`.

        Args:
            attention_mask: 1 = real token, [B, K] over cached and new tokens, padded on either side; or [B, 1, T, K]
                with True or 0.0 = allowed.
            position_ids: [B, T]; by default counted over the real tokens. Where they restart (with nothing
                cached yet), a packed document begins; documents do not read each other.
        """
        check_axes(input_ids, inputs_embeds)
        check_implementation(self.config, self.config._attn_implementation, paged=is_paged(cache))
        refuse_overridden(self.config._attn_implementation, f"block='{self.config.block}'")
        compare_processes(self)
        modules = [] if self.config.span is None else [layer.self_attn.spanned.spans for layer in self.layers]
        bounds = all_bounds(self, modules, attention_mask, position_ids)
        embedded = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        kept, options = (None if is_paged(cache) else cache), {**kwargs, "cache": cache}
        call = prepare_call(self.config, embedded, attention_mask, position_ids, kept, options, use_cache)
        hidden_states, where = self.positions(embedded, call)
        where |= block_masks(self.config, call, shards_of(self) is not None)
        if self.config.span is not None:
            where |= {"real_tokens": call.own_real_tokens(where["token_mask"], shards_of(self)), "bounds": bounds}
        if call.position_ids is not None:
            # from which flash attention finds packed documents
            where["position_ids"] = call.position_ids
        kwargs = {**kwargs, **where, "cache": cache if is_paged(cache) else call.cache}
        hidden_states, spans = self.dropout(hidden_states), []
        for layer in islice(self.layers, self.config.num_hidden_layers):
            hidden_states, span = layer(hidden_states, **kwargs)
            spans.append(span)
        states = self.norm(hidden_states)
        return BackboneOutput(states, call.cache, auxiliary_loss=span_penalty(self, spans, states))


class SimplifiedTransformerForCausalLM(
    SpanGeneration, MaskGeneration, CausalLMHead, SimplifiedTransformerPreTrainedModel, GenerationMixin
):
    backbone_class = SimplifiedTransformerModel


class SimplifiedTransformerForMaskedLM(MaskedLMHead, SimplifiedTransformerPreTrainedModel):
    backbone_class = SimplifiedTransformerModel


class SimplifiedTransformerForSequenceClassification(SequenceClassificationHead, SimplifiedTransformerPreTrainedModel):
    backbone_class = SimplifiedTransformerModel


class SimplifiedTransformerForTokenClassification(TokenClassificationHead, SimplifiedTransformerPreTrainedModel):
    backbone_class = SimplifiedTransformerModel


class SimplifiedTransformerForQuestionAnswering(QuestionAnsweringHead, SimplifiedTransformerPreTrainedModel):
    backbone_class = SimplifiedTransformerModel


class SimplifiedTransformerForMultipleChoice(MultipleChoiceHead, SimplifiedTransformerPreTrainedModel):
    backbone_class = SimplifiedTransformerModel


__all__ = [
    "SimplifiedTransformerForCausalLM",
    "SimplifiedTransformerForMaskedLM",
    "SimplifiedTransformerForMultipleChoice",
    "SimplifiedTransformerForQuestionAnswering",
    "SimplifiedTransformerForSequenceClassification",
    "SimplifiedTransformerForTokenClassification",
    "SimplifiedTransformerModel",
    "SimplifiedTransformerPreTrainedModel",
]
