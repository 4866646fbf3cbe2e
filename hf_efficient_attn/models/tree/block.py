"""A layer of a BP-Transformer: attention over nodes, then an MLP, each followed by a norm."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import EncoderDecoderCache
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_efficient_attn.layout.token_mask import NO_MASK, TokenMask
from hf_efficient_attn.models.encoder_decoder.cross_attention import CrossAttention
from hf_efficient_attn.models.parts.blocks import MLP, build_norm, finite
from hf_efficient_attn.models.tree.attention import TreeAttention
from hf_efficient_attn.models.tree.nodes import NextNodes, WholeTree


class BPLayer(GradientCheckpointingLayer):
    """One update of tokens and spans. [B, T, hidden_size] and [B, S, hidden_size] → the same.

    is_causal: tokens read to their left only; None: as the config says.
    """

    def __init__(self, config: Any, layer_idx: int, is_causal: bool | None = None) -> None:
        super().__init__()
        self.self_attn = TreeAttention(config, layer_idx, is_causal)
        self.attention_norm, self.mlp_norm = build_norm(config), build_norm(config)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(
        self, tokens: Tensor, spans: Tensor, nodes: WholeTree | NextNodes, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        states, num_tokens = self.read(tokens, spans, nodes, **kwargs), tokens.shape[1]
        states = self.transform(states)
        return states[:, :num_tokens], states[:, num_tokens:]

    def read(self, tokens: Tensor, spans: Tensor, nodes: WholeTree | NextNodes, **kwargs: Any) -> Tensor:
        """Return the states of tokens and spans after they have read their nodes, [B, T + S, hidden_size]."""
        attended, _ = self.self_attn(tokens, spans, nodes, **kwargs)
        return self.attention_norm(torch.cat((tokens, spans), 1) + self.dropout(torch.cat(attended, 1)))

    def transform(self, states: Tensor) -> Tensor:
        """Return what follows attention."""
        return finite(self.mlp_norm(states + self.dropout(self.mlp(states))))


class BPCrossLayer(BPLayer):
    """One update of tokens and spans in which tokens read others, too, that are not of their tree: those of a source.

    Shapes: [B, T, hidden_size] and [B, S, hidden_size] → the same. Spans have no second attention, and no norm behind
    it: they pass on what their tokens have read across, from the next layer on.
    """

    def __init__(self, config: Any, layer_idx: int, is_causal: bool | None = None) -> None:
        super().__init__(config, layer_idx, is_causal)
        self.cross_attn = CrossAttention(config, layer_idx)
        self.cross_norm = build_norm(config)

    # positional, since reentrant checkpointing returns gradients for positional arguments only
    def forward(
        self,
        tokens: Tensor,
        spans: Tensor,
        nodes: WholeTree | NextNodes,
        encoder_hidden_states: Tensor,
        source: TokenMask = NO_MASK,
        cache: EncoderDecoderCache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        num_tokens = tokens.shape[1]
        own_cache = None if cache is None else cache.self_attention_cache
        states = self.read(tokens, spans, nodes, cache=own_cache, **kwargs)
        # in memory of their own: torch multiplies a part of a tensor by frozen and by trainable weights in kernels that
        # round differently, and an adapter would not be the same while it trains and when it is loaded
        tokens, read = states[:, :num_tokens].contiguous(), encoder_hidden_states.contiguous()
        attended, _ = self.cross_attn(tokens, read, source, cache, **kwargs)
        tokens = self.cross_norm(tokens + self.dropout(attended))
        states = self.transform(torch.cat((tokens, states[:, num_tokens:]), 1))
        return states[:, :num_tokens], states[:, num_tokens:]
