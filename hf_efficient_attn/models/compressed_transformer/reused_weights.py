"""Reused weights: a layer without queries and keys of its own reads with the attention weights of the layer below.

    head = W V,  where W are the weights of the nearest layer below that has some

so that a block of layers has one map of queries and one of keys, and its cache one set of keys. W itself is not passed
on, which would keep all pairs: the engine computes it again from the queries and keys, by the pattern of that layer.
What is saved are parameters and the cache, and not scores. Each layer drops weights of its own.

Source: Ying, Ke, He & Liu, "LazyFormer: Self Attention with Lazy Update" (arXiv:2102.12702), as Lin et al., "A
Survey of Transformers" (arXiv:2106.04554), section 4.5.2, has it.
"""

from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import Cache

from hf_efficient_attn.attention.layer_patterns import LayerPattern, layer_pattern
from hf_efficient_attn.attention.layer_request import LayerRequest
from hf_efficient_attn.models.parts.cached_states import append_to_cache
from hf_efficient_attn.models.sparse.attention import SparseAttention

from .passed_states import PassedStates, check_cached_width


class LayerBelow(nn.Module):
    """What says which pattern the layer below follows."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx = config, layer_idx


class ReusedWeightsAttention(SparseAttention):
    """Attention by the weights of the layer below."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.q_proj = self.k_proj = None
        self.compared_layers = config.compared_layers(layer_idx)
        self.below = LayerBelow(config, self.compared_layers[-1])

    def _states(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        value = self.v_proj(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        # `_compared` has others
        return value, value, value

    def _update(
        self, cache: Cache, hidden_states: Tensor, key: Tensor, value: Tensor, rotation: Any
    ) -> tuple[Tensor, Tensor, None]:
        check_cached_width(cache, self.layer_idx, (value.shape[1], self.head_dim), (value.shape[1], 0))
        # a layer of a cache counts its tokens by its keys
        value, _ = append_to_cache(cache, value, value[..., :0], self.layer_idx)
        return value, value, None

    def _compared(self, query: Tensor, key: Tensor, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        passed: PassedStates = kwargs["passed_states"]
        return passed.joined(self.compared_layers, key)

    def _followed(self, global_positions: tuple[int, ...], num_keys: int) -> LayerPattern:
        return layer_pattern(self.below, {"is_causal": self.is_causal})

    def layer_request(self, num_keys: int, task: str | None) -> LayerRequest:
        return replace(super().layer_request(num_keys, task), head_dim=self.config.compared_width(self.layer_idx))
