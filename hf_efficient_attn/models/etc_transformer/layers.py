"""The parts of an ETC around its attention: what comes before the first layer, and the layer."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_efficient_attn.models.parts.blocks import MLP, build_norm, finite
from hf_efficient_attn.models.parts.embeddings import check_types

from .attention import EtcAttention
from .configuration_etc_transformer import EtcTransformerConfig
from .structure import Structure


class EtcEmbeddings(nn.Module):
    """Token types, and the norms of both inputs, before the first layer. [B, N, hidden_size] → the same."""

    def __init__(self, config: EtcTransformerConfig) -> None:
        super().__init__()
        size = config.type_vocab_size
        self.token_types = nn.Embedding(size, config.hidden_size) if size else None
        self.norm, self.global_norm = build_norm(config), build_norm(config)
        self.dropout = nn.Dropout(config.embedding_dropout)

    def forward(self, embedded: Tensor, types: Tensor | None, default: int, norm: nn.Module, name: str) -> Tensor:
        """Return the first states of one input.

        Args:
            types: of its tokens, [B, N]; None: all are of type `default`.
            name: of the types, for messages.

        Raises:
            InputError: types of another shape, or that the model does not have.
        """
        if types is not None:
            check_types(types, embedded, 0 if self.token_types is None else self.token_types.num_embeddings, name)
        if self.token_types is not None:
            if types is None:
                types = torch.full(embedded.shape[:2], default, dtype=torch.long, device=embedded.device)
            embedded = embedded + self.token_types(types)
        return self.dropout(norm(embedded))


class EtcLayer(GradientCheckpointingLayer):
    """One layer. Shapes: long [B, T, hidden_size] and global [B, G, hidden_size] → the same.

    Post-norm: x ← N(x + f(x)), as BERT. Pre-norm: x ← x + f(N(x)).
    """

    def __init__(self, config: EtcTransformerConfig, layer_idx: int) -> None:
        super().__init__()
        self.is_pre_norm = config.norm_position == "pre"
        self.self_attn = EtcAttention(config, layer_idx)
        self.attention_norm, self.global_attention_norm = build_norm(config), build_norm(config)
        self.mlp, self.mlp_norm = MLP(config, config.gated_mlp), build_norm(config)
        is_shared = config.share_feed_forward
        self.global_mlp = None if is_shared else MLP(config, config.gated_mlp)
        self.global_mlp_norm = None if is_shared else build_norm(config)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(self, long: Tensor, globals_: Tensor, structure: Structure, **kwargs: Any) -> tuple[Tensor, Tensor]:
        norms = (self.attention_norm, self.global_attention_norm)
        states = (long, globals_)
        if self.is_pre_norm:
            read = [norm(each) for norm, each in zip(norms, states, strict=True)]
            out, _, global_out, _ = self.self_attn(*read, structure, **kwargs)
        else:
            out, _, global_out, _ = self.self_attn(*states, structure, **kwargs)
        mlps = (self.mlp, self.mlp_norm)
        long = self.followed_by(long, out, norms[0], *mlps)
        mlps = mlps if self.global_mlp is None else (self.global_mlp, self.global_mlp_norm)
        return long, self.followed_by(globals_, global_out, norms[1], *mlps)

    def followed_by(self, states: Tensor, read: Tensor, norm: nn.Module, mlp: nn.Module, mlp_norm: nn.Module) -> Tensor:
        """Return the states of one input, given what they have read, after the MLP."""
        states = states + self.dropout(read)
        return self.fed(states if self.is_pre_norm else norm(states), mlp, mlp_norm)

    def fed(self, states: Tensor, mlp: nn.Module, norm: nn.Module) -> Tensor:
        """Return the states of one input after its MLP."""
        if self.is_pre_norm:
            return finite(states + self.dropout(mlp(norm(states))))
        return finite(norm(states + self.dropout(mlp(states))))


def with_all_gradients(long: Tensor, globals_: Tensor) -> tuple[Tensor, Tensor]:
    """Return both states as they are; what one of them was computed from has a gradient of 0 from the other.

    Heads leave one of them aside, and DDP waits for the gradient of every parameter.
    """
    if not torch.is_grad_enabled():
        return long, globals_
    return long + 0 * globals_[:, :1], globals_ + 0 * long[:, :1]
