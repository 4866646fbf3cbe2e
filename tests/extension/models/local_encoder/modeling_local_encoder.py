"""An encoder whose tokens read a few tokens on either side."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from hf_efficient_attn.attention.layer_attention import attend_layer
from hf_efficient_attn.attention.layer_patterns import LayerPattern
from hf_efficient_attn.attention.processes import compare_processes
from hf_efficient_attn.layout.token_mask import NO_MASK, TokenMask
from hf_efficient_attn.models.base import EfficientPreTrainedModel
from hf_efficient_attn.models.heads.outputs import BackboneOutput
from hf_efficient_attn.models.heads.task_heads import MaskedLMHead, TokenClassificationHead
from hf_efficient_attn.models.implementations import backend_of
from hf_efficient_attn.models.inputs.masks import bring_inputs
from hf_efficient_attn.models.parts.blocks import MLP, build_norm, drop_rate, finite
from hf_efficient_attn.models.parts.embeddings import EmbeddingSum
from hf_efficient_attn.models.prologue import prepare_call
from hf_efficient_attn.models.sparse.inputs import check_inputs
from hf_efficient_attn.patterns.bands import Band

from .configuration_local_encoder import LocalEncoderConfig


class LocalAttention(nn.Module):
    """Attention over the tokens within reach. [B, T, hidden_size] → the same, and the weights or None."""

    def __init__(self, config: LocalEncoderConfig) -> None:
        super().__init__()
        self.config, self.head_dim = config, config.head_dim
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(config.hidden_size, config.hidden_size) for _ in range(4)
        )
        self.dropout = nn.Dropout(config.attention_dropout)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        token_mask: TokenMask = NO_MASK,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        query, key, value = (
            projection(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        out, weights = attend_layer(
            query,
            key,
            value,
            LayerPattern(Band(self.config.reach_tokens, self.config.reach_tokens), is_own=False),
            token_mask,
            self.head_dim**-0.5,
            drop_rate(self.dropout),
            matrix=attention_mask,
            need_weights=bool(kwargs.get("output_attentions", self.config.output_attentions)),
            backend=backend_of(self.config),
        )
        return self.o_proj(out.flatten(2)), weights


class LocalLayer(GradientCheckpointingLayer):
    """One pre-norm block. [B, T, hidden_size] → the same."""

    def __init__(self, config: LocalEncoderConfig) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = build_norm(config), build_norm(config)
        self.self_attn, self.mlp = LocalAttention(config), MLP(config)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        attended, _ = self.self_attn(self.attention_norm(hidden_states), **kwargs)
        hidden_states = hidden_states + self.dropout(attended)
        return finite(hidden_states + self.dropout(self.mlp(self.mlp_norm(hidden_states))))


class LocalEncoderPreTrainedModel(EfficientPreTrainedModel):
    """What the backbone and its heads share."""

    config_class = LocalEncoderConfig
    base_model_prefix = "model"
    model_tags = ["efficient-attention", "local-encoder", "hf_efficient_attn"]
    _no_split_modules = ["LocalLayer"]
    _can_record_outputs = {"hidden_states": LocalLayer, "attentions": LocalAttention}


class LocalEncoderModel(LocalEncoderPreTrainedModel):
    """The backbone: embeddings, blocks, final norm. Shapes: input_ids [B, T] → [B, T, hidden_size]."""

    def __init__(self, config: LocalEncoderConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.embeddings = EmbeddingSum(config)
        self.layers = nn.ModuleList(LocalLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = build_norm(config)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> BackboneOutput:
        """Return the last hidden state; for the arguments see `SparseTransformerModel`."""
        check_inputs(self.config, input_ids, inputs_embeds)
        bring_inputs(attention_mask, position_ids)
        compare_processes(self)
        embedded = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        call = prepare_call(self.config, embedded, attention_mask, position_ids, None, kwargs)
        hidden_states, _ = self.embeddings(call)
        masks = call.masks(self.config)
        for layer in self.layers:
            hidden_states = layer(hidden_states, **kwargs, **masks)
        return BackboneOutput(last_hidden_state=self.norm(hidden_states))


class LocalEncoderForMaskedLM(MaskedLMHead, LocalEncoderPreTrainedModel):
    backbone_class = LocalEncoderModel


class LocalEncoderForTokenClassification(TokenClassificationHead, LocalEncoderPreTrainedModel):
    backbone_class = LocalEncoderModel


__all__ = [
    "LocalEncoderForMaskedLM",
    "LocalEncoderForTokenClassification",
    "LocalEncoderModel",
    "LocalEncoderPreTrainedModel",
]
