"""Queries and keys that a layer passes on to layers above, which compare them again: memory grows as the text does."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from hf_efficient_attn.errors import InputError, UnsupportedBackendError
from hf_efficient_attn.models.sparse.attention import SparseAttention


class PassedStates:
    """What the layers of one forward pass pass on: by index of a layer its queries and keys, [B, H, T or K, D].

    No dict, of which libraries that move or cast arguments would give each layer a copy.
    """

    def __init__(self) -> None:
        self._of_layer: dict[int, tuple[Tensor, Tensor]] = {}
        self._have_gradients = True

    def keep(self, layer: int, query: Tensor, key: Tensor) -> None:
        """Pass on the queries of the new tokens of a layer, and all its keys, the cached ones first."""
        self._of_layer[layer] = query, key
        self._have_gradients &= torch.is_grad_enabled()

    def joined(self, layers: Sequence[int], own: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries and keys of which the products are the sums of those of layers, one beside the other.

        own: states of the layer that reads, for as many keys: [B, any, K, any].

        Raises:
            InputError: the cache of a layer holds other tokens.
        """
        queries, keys = zip(*(self._of_layer[layer] for layer in layers), strict=True)
        if any(key.shape[2] != own.shape[2] for key in keys):
            counts = ", ".join(f"layer {layer} {key.shape[2]}" for layer, key in zip(layers, keys, strict=True))
            raise InputError(
                f"Keys of several layers are read together, but they are of different tokens: of {counts}, and "
                f"{own.shape[2]} are read. Generate with the default cache, which holds all keys of all layers."
            )
        query, key = (torch.cat([each.to(own.device) for each in states], -1) for states in (queries, keys))
        return query, key

    def check_gradients(self) -> None:
        """Refuse layers that were computed without gradients in a pass that has them.

        Raises:
            UnsupportedBackendError: they were; layers below would get no gradient from those that read with theirs.
        """
        if torch.is_grad_enabled() and not self._have_gradients:
            raise UnsupportedBackendError(
                "Layers read with the queries and keys of layers below, which were computed without gradients, as in "
                "gradient checkpointing with use_reentrant=True. Give "
                "gradient_checkpointing_kwargs={'use_reentrant': False}."
            )


class PassingAttention(SparseAttention):
    """Attention that follows a pattern, and passes its queries and keys on where a layer above reads with them."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        above = range(layer_idx + 1, config.num_hidden_layers)
        self.passes_on = any(layer_idx in config.compared_layers(layer) for layer in above)

    def _compared(self, query: Tensor, key: Tensor, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        if self.passes_on:
            kwargs["passed_states"].keep(self.layer_idx, query, key)
        return query, key


def check_cached_width(cache: Cache, layer_idx: int, keys: tuple[int, int], values: tuple[int, int]) -> None:
    """Raise UnsupportedBackendError if a cache was filled by code that does not know what a layer keeps.

    keys, values: their heads, and numbers of a head.
    """
    layer = cache.layers[layer_idx] if layer_idx < len(cache.layers) else None
    for name, wanted in (("keys", keys), ("values", values)):
        held = getattr(layer, name, None)
        if held is not None and held.ndim == 4 and held.shape[2] and (held.shape[1], held.shape[3]) != wanted:
            raise UnsupportedBackendError(
                f"The cache holds {name} of {held.shape[1]} heads and {held.shape[3]} numbers, but layer {layer_idx} "
                f"keeps {wanted[0]} and {wanted[1]}. Prefix tuning cannot give it keys; use prompt tuning or LoRA "
                "instead."
            )
