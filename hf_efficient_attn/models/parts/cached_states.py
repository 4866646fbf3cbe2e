"""New keys and values appended to those of a cache, whatever their dtypes."""

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from hf_efficient_attn.layout.tracing import autocast_states


def append_to_cache(cache: Cache, key: Tensor, value: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
    """Return keys and values of cached and new tokens, [B, H, K, D], in the dtypes of the new ones.

    Under autocast both have its dtype, in which attention reads them anyway. A layer of a cache keeps the dtype of its
    first keys, since the buffers of a static cache cannot change theirs.
    """
    key, value = autocast_states(key, value)
    held = held_dtype(cache, layer_idx) or key.dtype
    keys, values = cache.update(key.to(held), value.to(held), layer_idx)
    return keys.to(key.dtype), values.to(value.dtype)


def held_dtype(cache: Cache, layer_idx: int) -> torch.dtype | None:
    """Return the dtype of the keys that a layer holds; None: it holds none yet."""
    if layer_idx >= len(cache.layers):
        return None
    keys = cache.layers[layer_idx].keys
    return None if keys is None else keys.dtype
