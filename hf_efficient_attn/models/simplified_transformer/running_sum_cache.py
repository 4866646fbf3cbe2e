"""Cache layers that also keep the running sum of their values, so that C·V costs O(1) per generated token.

The sum is state besides keys and values: it is reordered with beams, and dropped by cropping (assisted decoding), after
which the next forward pass rebuilds it from the cached values. `attach_running_sums` turns the plain layers of any
transformers cache into these; layers of other kinds (quantised) keep working without the sum.
"""

import torch
from transformers.cache_utils import Cache, DynamicLayer, StaticLayer

from hf_efficient_attn.models.parts.cached_states import append_to_cache

from .centering import Centering


class RunningSumDynamicLayer(DynamicLayer):
    """A `DynamicLayer` with `value_sum`: [B, 1, hidden_size] in float32 or wider, or None if it must be rebuilt."""

    value_sum: torch.Tensor | None = None

    def advance(self, centering: Centering, values: torch.Tensor) -> torch.Tensor | float:
        """Return the sum over the cached values and add the new ones to it. Shape of `values`: [B, T, hidden_size]."""
        past_sum: torch.Tensor | float = 0.0
        if self.get_seq_length() > 0:
            past_sum = self.value_sum if self.value_sum is not None else centering.sum_past(merge_heads(self.values))
        self.value_sum = past_sum + centering.sum(values)
        return past_sum

    def forget_sum(self) -> None:
        """Have the next `advance` rebuild the sum from the cached values."""
        self.value_sum = None

    def reset(self) -> None:
        super().reset()
        self.forget_sum()

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        if tokens_to_remove != 0:
            self.forget_sum()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        if self.value_sum is not None:
            self.value_sum = self.value_sum[beam_idx.to(self.value_sum.device)]

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)
        if self.value_sum is not None:
            self.value_sum = self.value_sum[indices]

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        if self.value_sum is not None:
            self.value_sum = self.value_sum.repeat_interleave(repeats, dim=0)


class RunningSumStaticLayer(StaticLayer):
    """A `StaticLayer` with `value_sum`, [B, 1, hidden_size] in float32 or wider, held at a fixed address."""

    value_sum: torch.Tensor | None = None
    is_stale = False

    def advance(self, centering: Centering, values: torch.Tensor) -> torch.Tensor:
        """As `RunningSumDynamicLayer.advance`, in place."""
        if self.value_sum is None:
            self.value_sum = torch.zeros_like(values[:, :1], dtype=torch.promote_types(values.dtype, torch.float32))
            self.is_stale = self.is_initialized
            if not torch.compiler.is_compiling():
                torch._dynamo.mark_static_address(self.value_sum)
        if self.is_stale:
            self.value_sum.copy_(centering.sum_past(merge_heads(self.values)))  # unused slots hold zeros
            self.is_stale = False
        past_sum = self.value_sum.clone()
        self.value_sum.add_(centering.sum(values))
        return past_sum

    def forget_sum(self) -> None:
        """Have the next `advance` rebuild the sum from the cached values."""
        self.is_stale = True

    def reset(self) -> None:
        super().reset()
        self.is_stale = False
        if self.value_sum is not None:
            self.value_sum.zero_()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        if self.value_sum is not None:
            self.value_sum = self.value_sum[beam_idx.to(self.value_sum.device)]


ADOPTED_BY: dict[type, type] = {DynamicLayer: RunningSumDynamicLayer, StaticLayer: RunningSumStaticLayer}


def attach_running_sums(cache: Cache, num_layers: int) -> None:
    """Turn the plain layers of `cache` into layers that keep the running sum, in place; a second call does nothing."""
    if cache.layer_class_to_replicate is DynamicLayer:
        cache.layer_class_to_replicate = RunningSumDynamicLayer
        while len(cache.layers) < num_layers:
            cache.layers.append(RunningSumDynamicLayer())
    for index, layer in enumerate(cache.layers):
        if type(layer) in ADOPTED_BY:
            adopted = ADOPTED_BY[type(layer)].__new__(ADOPTED_BY[type(layer)])
            adopted.__dict__.update(layer.__dict__)
            cache.layers[index] = adopted


def append_and_sum(
    cache: Cache,
    key: torch.Tensor,
    value: torch.Tensor,
    layer_idx: int,
    centering: Centering | None,
    values: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | float]:
    """Return keys and values of cached and new tokens, [B, H, K, D], and the sum of the cached values, [B, 1, H·D].

    Args:
        key, value: of the new tokens, [B, H, T, D]; `values` the same values as [B, T, H·D].
        centering: None: no sum is needed, and it is 0.0.
    """
    if centering is None:
        return *append_to_cache(cache, key, value, layer_idx), 0.0
    layer, past_sum = cache.layers[layer_idx], 0.0
    keeps_sum = hasattr(layer, "advance")
    if centering.matrix is None:
        past_sum = layer.advance(centering, values) if keeps_sum else None
    elif keeps_sum:
        layer.forget_sum()
    key, value = append_to_cache(cache, key, value, layer_idx)
    if past_sum is None:
        past_sum = centering.sum_past(merge_heads(value[:, :, : -values.shape[1]]))
    return key, value, past_sum


def merge_heads(values: torch.Tensor) -> torch.Tensor:
    """Return [B, H, K, D] as [B, K, H·D]."""
    return values.transpose(1, 2).flatten(2)
