"""Residual scores: each layer adds the scores of the layer below to its own, before the softmax (RealFormer).

    S_l = Q_l K_lᵀ / √D + S_(l−1),  head = softmax(S_l) V

for each head, without parameters; the lowest such layer has no prior. A sum of products of vectors is the product of
longer vectors,

    S_l = [Q_1 … Q_l] [K_1 … K_l]ᵀ / √D

so that a layer asks the engine for attention with queries and keys that are l times as long, and values as they are.
It follows `attention_pattern`, and takes memory in proportion to the text where that does: no scores are passed on, but
queries and keys. Masks take part in no layer's scores but its own. In decoding, keys are those that the cache has.

Source: He et al., "RealFormer" (arXiv:2012.11747), section 3, as Lin et al., "A Survey of Transformers"
(arXiv:2106.04554), section 4.5.2, has it. That queries and keys are passed on instead of scores is ours.
"""

from dataclasses import replace
from typing import Any

from torch import Tensor

from hf_efficient_attn.attention.layer_request import LayerRequest

from .passed_states import PassedStates, PassingAttention


class ResidualScoresAttention(PassingAttention):
    """Attention that follows a pattern and adds the scores of the layer below."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.compared_layers = config.compared_layers(layer_idx)
        self.passes_on |= len(self.compared_layers) > 1

    def _compared(self, query: Tensor, key: Tensor, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        query, key = super()._compared(query, key, kwargs)
        if len(self.compared_layers) == 1:
            return query, key
        passed: PassedStates = kwargs["passed_states"]
        return passed.joined(self.compared_layers, key)

    def layer_request(self, num_keys: int, task: str | None) -> LayerRequest:
        return replace(super().layer_request(num_keys, task), head_dim=self.config.compared_width(self.layer_idx))
