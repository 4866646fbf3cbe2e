"""Shaped attention with a prior by distance G: A is softmax(Q Kᵀ / √D + G), and C is softmax(G).

C is A where queries are 0, as W^Q starts, so that shaped attention starts as the identity (He & Hofmann,
arXiv:2311.01906, section 4.1) whatever the prior; it takes as long as A. Both are over what the layer's
`attention_pattern` allows, if there is one. No paper combines the two.
"""

from typing import Any

import torch

from hf_efficient_attn.layout.terms import Label, Term
from hf_efficient_attn.models.mechanisms.prior import HasPrior

from .engine_attention import BlockSoftmax


class BlockPrior(HasPrior, BlockSoftmax):
    """Attention of a layer with a prior; its only parameters are those of the prior."""

    computes_mean = True

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.make_prior(config)

    def terms(self, num_keys: int, dtype: torch.dtype, device: torch.device) -> tuple[Term, ...]:
        return (self.prior_term(num_keys, dtype, device),)

    def labels(self, num_keys: int) -> tuple[Label, ...]:
        return (self.prior_reach(num_keys),)
