"""Softmax attention that a layer asks the engine for itself: in models whose other layers have a mechanism.

Their masks are token masks, which no attention function of transformers takes. A is softmax(Q Kᵀ / √D), over what the
layer's `attention_pattern` allows; C is A where queries are 0, as W^Q starts: over the same keys, or, without a
pattern, the running mean of `centering.py`.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_efficient_attn.attention.key_tokens import QueryOffset
from hf_efficient_attn.attention.layer_attention import attend_layer
from hf_efficient_attn.attention.layer_patterns import layer_pattern, module_pattern
from hf_efficient_attn.attention.layer_request import LayerRequest
from hf_efficient_attn.attention.sharded.sequence_shards import shards_of
from hf_efficient_attn.layout.terms import Label, Term
from hf_efficient_attn.layout.token_mask import NO_MASK, TokenMask
from hf_efficient_attn.models.global_tokens.shared_rows import keys_of_text
from hf_efficient_attn.models.implementations import backend_of


class BlockSoftmax(nn.Module):
    """Attention of a layer by softmax, without parameters."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx, self.is_causal = config, layer_idx, config.is_causal

    @property
    def computes_mean(self) -> bool:
        """Whether C is over what the layer reads, and takes as long as A; otherwise it is over all tokens."""
        return module_pattern(self, self.is_causal) is not None

    def terms(self, num_keys: int, dtype: torch.dtype, device: torch.device) -> tuple[Term, ...]:
        """Return what is added to the scores among so many keys, of A and of C."""
        return ()

    def labels(self, num_keys: int) -> tuple[Label, ...]:
        """Return the labels of these terms."""
        return ()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        token_mask: TokenMask = NO_MASK,
        query_offset: QueryOffset = None,
        dropout: float = 0.0,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return A·V [B, T, H, D], the weights A or None, and C·V or None, if it `computes_mean`.

        Args:
            query, key, value: [B, H, T or K, D].
            attention_mask, token_mask, query_offset: see `key_masks`.
            dropout: probability with which a weight of A is dropped.
            kwargs: `position_bias` or `position_terms`, what ALiBi adds to the scores of A.
        """
        shards = shards_of(self)
        followed = replace(layer_pattern(self, {"is_causal": self.is_causal}), shards=shards)
        terms = self.terms(keys_of_text(shards, key, token_mask), query.dtype, query.device)
        common: dict[str, Any] = {
            "tokens": token_mask,
            "query_offset": query_offset,
            "matrix": attention_mask,
            "backend": backend_of(self.config),
        }
        out, weights = attend_layer(
            query,
            key,
            value,
            followed,
            scale=query.shape[3] ** -0.5,
            dropout=dropout,
            need_weights=bool(kwargs.get("output_attentions", self.config.output_attentions)),
            bias=kwargs.get("position_bias"),
            terms=(*terms, *kwargs.get("position_terms", ())),
            **common,
        )
        centre = None
        if self.config.is_centered and self.computes_mean:
            states = (query.detach(), key.detach(), value)
            centre, _ = attend_layer(*states, followed, scale=0.0, terms=terms, **common)
        return out, weights, centre

    def layer_request(self, num_keys: int, task: str | None) -> LayerRequest:
        """Return what this layer asks the engine for at a length in tokens."""
        config = self.config
        return LayerRequest(
            layer_pattern(self, {"is_causal": self.is_causal}),
            config.num_attention_heads,
            config.key_value_heads,
            config.head_dim,
            config.head_dim,
            config,
            is_causal=self.is_causal,
            layer=self.layer_idx,
            fixed_labels=self.labels(num_keys),
            has_bias=config.position_embedding_type == "alibi",
            backend=backend_of(config),
            notes=config.attention_notes if self.computes_mean else (),
            sends_more=config.sends_more,
        )
