"""Attention with a prior by distance (`models/mechanisms/prior.py`): softmax(Q Kᵀ / √D + G) V.

Layers follow `attention_pattern`, and take memory in proportion to the text where that does.
"""

from dataclasses import replace
from typing import Any

from torch import Tensor

from hf_efficient_attn.attention.layer_patterns import LayerPattern
from hf_efficient_attn.attention.layer_request import LayerRequest
from hf_efficient_attn.models.mechanisms.prior import HasPrior
from hf_efficient_attn.models.sparse.attention import SparseAttention


class PriorAttention(HasPrior, SparseAttention):
    """Attention that follows a pattern, with a prior by distance."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.make_prior(config)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, followed: LayerPattern, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        term = self.prior_term(key.shape[2], query.dtype, query.device)
        return super()._attend(query, key, value, followed, {**options, "terms": (term,)})

    def layer_request(self, num_keys: int, task: str | None) -> LayerRequest:
        return replace(super().layer_request(num_keys, task), fixed_labels=(self.prior_reach(num_keys),))
