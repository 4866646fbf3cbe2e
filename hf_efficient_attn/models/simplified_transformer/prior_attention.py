"""Shaped attention with a prior by distance G: A is softmax(Q Kᵀ / √D + G), and C is softmax(G).

C is A where queries are 0, as W^Q starts, so that shaped attention starts as the identity (He & Hofmann,
arXiv:2311.01906, section 4.1) whatever the prior; it takes as long as A. No paper combines the two.
"""

from dataclasses import replace
from typing import Any

from torch import Tensor

from hf_efficient_attn.attention.key_tokens import QueryOffset
from hf_efficient_attn.attention.layer_attention import attend_layer
from hf_efficient_attn.attention.layer_patterns import layer_pattern
from hf_efficient_attn.attention.layer_request import LayerRequest
from hf_efficient_attn.attention.sharded.sequence_shards import shards_of
from hf_efficient_attn.attention.sharded.traffic import HeadNumbers
from hf_efficient_attn.layout.token_mask import NO_MASK, TokenMask
from hf_efficient_attn.models.global_tokens.shared_rows import keys_of_text
from hf_efficient_attn.models.implementations import backend_of
from hf_efficient_attn.models.mechanisms.prior import DistancePrior


class BlockPrior(DistancePrior):
    """Attention of a layer with a prior; its only parameters are those of the prior."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config)
        self.config, self.layer_idx = config, layer_idx

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
        """Return A·V [B, T, H, D], the weights A or None, and C·V or None.

        Args:
            query, key, value: [B, H, T or K, D].
            attention_mask, token_mask, query_offset: see `key_masks`.
            dropout: probability with which a weight of A is dropped.
        """
        shards = shards_of(self)
        followed = replace(layer_pattern(self, {"is_causal": self.is_causal}), shards=shards)
        term = self.prior_term(keys_of_text(shards, key, token_mask), query.dtype, query.device)
        common: dict[str, Any] = {
            "tokens": token_mask,
            "query_offset": query_offset,
            "matrix": attention_mask,
            "terms": (term,),
            "backend": backend_of(self.config),
        }
        need_weights = bool(kwargs.get("output_attentions", self.config.output_attentions))
        scale = query.shape[3] ** -0.5
        out, weights = attend_layer(
            query, key, value, followed, scale=scale, dropout=dropout, need_weights=need_weights, **common
        )
        centre = None
        if self.config.is_centered:
            centre, _ = attend_layer(query.detach(), key.detach(), value, followed, scale=0.0, **common)
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
            fixed_labels=(self.prior_reach(num_keys),),
            backend=backend_of(config),
            notes=config.attention_notes,
            of_mean=HeadNumbers(config.head_dim, config.head_dim) if config.is_centered else None,
        )
