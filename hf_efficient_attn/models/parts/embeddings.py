"""What comes before the first block: token, position and type embeddings, their norm and dropout."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init

from hf_efficient_attn.errors import InputError
from hf_efficient_attn.layout.transfer import on_host
from hf_efficient_attn.models.parts.blocks import build_norm
from hf_efficient_attn.models.parts.positions import Positions
from hf_efficient_attn.models.prologue import PreparedCall


class TokenEmbedding(nn.Embedding):
    """The embedding of tokens. It starts as N(0, `embedding_init_std`²), or, with None, as every other matrix."""

    def __init__(self, config: Any) -> None:
        super().__init__(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.initial_std = config.embedding_init_std

    def initialize(self) -> None:
        # the weight, padding included, may come from a checkpoint
        if self.initial_std is None or getattr(self.weight, "_is_hf_initialized", False):
            return
        init.normal_(self.weight, std=self.initial_std)
        if self.padding_idx is not None:
            init.zeros_(self.weight[self.padding_idx])


class EmbeddingSum(nn.Module):
    """Scale token embeddings and add positions and token types; then norm and dropout. [B, T, hidden_size] → the same.

    Reads from the config: `scale_embedding`, `embedding_norm`, `embedding_dropout`, and what `Positions` reads.

    num_types: the number of token types; 0: there are none.
    """

    def __init__(self, config: Any, size_field: str = "max_position_embeddings", num_types: int = 0) -> None:
        super().__init__()
        self.scale = config.hidden_size**0.5 if config.scale_embedding else None
        self.positions = Positions(config, size_field)
        self.token_types = nn.Embedding(num_types, config.hidden_size) if num_types else None
        self.norm = build_norm(config) if config.embedding_norm else nn.Identity()
        self.dropout = nn.Dropout(config.embedding_dropout)

    def forward(self, call: PreparedCall, token_type_ids: Tensor | None = None) -> tuple[Tensor, dict[str, Any]]:
        """Return the first hidden states, and keyword arguments for every attention layer; see `Positions`.

        Raises:
            InputError: token types for a model that has none or fewer, or a position beyond the end of a learned table.
        """
        embedded = call.embedded if self.scale is None else call.embedded * self.scale
        embedded, where = self.positions(embedded, call)
        if self.token_types is not None:
            if token_type_ids is None:
                token_type_ids = torch.zeros(embedded.shape[:2], dtype=torch.long, device=embedded.device)
            else:
                check_types(token_type_ids, embedded, self.token_types.num_embeddings)
            embedded = embedded + self.token_types(token_type_ids)
        elif token_type_ids is not None:
            check_types(token_type_ids, embedded, 0)
        return self.dropout(self.norm(embedded)), where


def check_types(types: Tensor, embedded: Tensor, size: int, name: str = "token_type_ids") -> None:
    """Raise InputError for token types of another shape than the tokens, or that a model does not have.

    While compiling, values are not checked.

    Args:
        embedded: the tokens, [B, T, hidden_size].
        size: how many types the model has.
    """
    shape = tuple(embedded.shape[:2])
    if types.ndim != 2 or types.shape[1] != shape[1] or types.shape[0] not in (1, shape[0]):
        raise InputError(f"{name} has shape {list(types.shape)}; it must be {list(shape)}, a type for each token.")
    if torch.compiler.is_compiling() or not types.numel():
        return
    least, most = (int(each) for each in on_host(types).aminmax())
    if size == 0 and (least or most):
        raise InputError(
            f"{name} has types other than 0, but this model has no token types (type_vocab_size=0). Leave "
            "them out, or build it with type_vocab_size=2."
        )
    if size and (least < 0 or most >= size):
        raise InputError(
            f"{name} has type {most if most >= size else least}, but type_vocab_size={size}: types are 0 to "
            f"{size - 1}. Leave them out, or build the model with type_vocab_size={max(most + 1, 2)}."
        )
