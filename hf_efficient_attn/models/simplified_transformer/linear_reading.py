"""Linear attention as the A of shaped attention, and a cache that keeps sums alone.

A = φ(Q) φ(K)ᵀ, divided by its row sums, is uniform where all keys are equal, whatever the queries. So W^K starts at 0,
where with softmax W^Q does, and C is the mean that it is there: shaped attention starts as the identity (He & Hofmann,
arXiv:2311.01906, section 4.1), but for the epsilon of the features. No paper combines the two.
"""

from torch import Tensor

from hf_efficient_attn.models.mechanisms.linear_reading import LinearReading
from hf_efficient_attn.models.mechanisms.state_cache import StateLayer

from .centering import Centering


class BlockReading(LinearReading):
    """Linear attention of the queries, keys and values that a block has made, given side by side."""

    def project(self, states: Tensor) -> tuple[Tensor, ...]:
        return states.chunk(3, -1)


class CentredStateLayer(StateLayer):
    """The sums of linear attention, and that of values, `value_sum`: [B, 1, hidden_size] in float32."""

    kept = ("keys", "values", "value_sum")
    value_sum: Tensor | None = None

    def advance(self, centering: Centering, values: Tensor) -> Tensor | float:
        """Return the sum over the tokens so far, and add the new values to it, [B, T, hidden_size]."""
        past_sum = 0.0 if self.value_sum is None else self.value_sum
        self.value_sum = past_sum + centering.sum(values)
        return past_sum
