"""A prior by distance, which is added to the score of a pair and does not depend on the content of the sequence.

    G_ij = −|w (i − j)² + b|,  with w ≥ 0 and b ≤ 0 for each head

The weight of a key falls with its distance like a Gaussian, and a token itself may have less weight than its
neighbours. Either w and b are trained, or w = 1 / (2 σ²) and b = 0 for a Gaussian of σ tokens. G is a term of the
engine with one value for each distance.

Sources: Guo et al., "Gaussian Transformer" (AAAI 2019), as described in Lin et al., "A Survey of Transformers"
(arXiv:2106.04554), section 4.5.1. The initial values are ours: w of a Gaussian of σ tokens, and b = −0.1, because with
b = 0 it would have no gradient.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init

from hf_efficient_attn.attention.build_call import LayerPattern
from hf_efficient_attn.attention.explanation import LayerRequest
from hf_efficient_attn.layout.score_terms import Distance, Term
from hf_efficient_attn.models.parts.relative_positions import within
from hf_efficient_attn.models.sparse.attention import SparseAttention

# initial b of a trained prior
START_BIAS = -0.1
# longer than any sequence
MOST_DISTANCE = 2**24


class PriorAttention(SparseAttention):
    """Attention with a pattern and a prior, softmax(Q Kᵀ / √D + G) V; its memory is that of the pattern.

    If the prior is trained, `prior_weight` and `prior_bias` have one number per head; otherwise they are None.
    """

    prior_weight: nn.Parameter | None
    prior_bias: nn.Parameter | None

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.width, self.most_tokens = config.prior_width_tokens, config.max_position_embeddings
        self.prior_weight = self.prior_bias = None
        if config.prior_is_trained:
            self.prior_weight, self.prior_bias = (nn.Parameter(torch.empty(self.num_heads)) for _ in range(2))

    def initialize(self) -> None:
        """Initialize as the Gaussian of a prior that is not trained, but with `START_BIAS`."""
        if self.prior_weight is not None:
            init.constant_(self.prior_weight, 1 / (2 * self.width**2))
            init.constant_(self.prior_bias, START_BIAS)

    def prior(self, distances: Tensor, dtype: torch.dtype) -> Tensor:
        """Return G for these distances in tokens, [L] → [H or 1, L], in this dtype, computed in float32 or wider."""
        squares = distances.to(torch.promote_types(dtype, torch.float32)).square()
        if self.prior_weight is None or self.prior_bias is None:
            return -(squares / (2 * self.width**2)).unsqueeze(0).to(dtype)
        weight, bias = (each.to(squares.dtype).abs().unsqueeze(1) for each in (self.prior_weight, self.prior_bias))
        return -(weight * squares - bias).abs().to(dtype)

    def prior_term(self, num_keys: int, dtype: torch.dtype, device: torch.device) -> Term:
        """Return G as a term, for all distances between `num_keys` keys."""
        reach = self.prior_reach(num_keys)
        distances = torch.arange(reach.first, reach.last + 1, device=device)
        return Term(self.prior(distances, dtype)[None, :, None], reach)

    def prior_reach(self, num_keys: int) -> Distance:
        """Return the range of distances between `num_keys` keys, or between `most_tokens` keys when exporting."""
        last = self.most_tokens - 1 if torch.compiler.is_exporting() else MOST_DISTANCE
        return within(Distance(0 if self.is_causal else -last, last), num_keys)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, layer_spec: LayerPattern, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        term = self.prior_term(key.shape[2], query.dtype, query.device)
        return super()._attend(query, key, value, layer_spec, {**options, "terms": (term,)})

    def layer_request(self, num_keys: int, task: str | None) -> LayerRequest:
        return replace(super().layer_request(num_keys, task), fixed_labels=(self.prior_reach(num_keys),))
