"""The cache layer of linear attention, whose sums have the same size after any number of tokens.

Its base class is shared by all cache layers that keep less than all keys and values.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, StaticLayer

from hf_efficient_attn.errors import InputError, UnsupportedBackendError
from hf_efficient_attn.models.mechanisms.linear import KeySum


class SummaryLayer(CacheLayerMixin):
    """A cache layer that keeps less than a key and a value for every token, so the last tokens cannot be removed.

    most_tokens: number of tokens that the other layers of a static cache have room for; None: they grow.
    """

    is_sliding = False
    is_croppable = False
    # names of the tensors that it keeps, each with a row for every sequence
    kept: tuple[str, ...] = ("keys", "values")

    def __init__(self, most_tokens: int | None = None) -> None:
        super().__init__()
        self.most_tokens, self.num_tokens = most_tokens, 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Refuse keys and values.

        Raises:
            UnsupportedBackendError: always.
        """
        raise UnsupportedBackendError(KEYLESS)

    def get_seq_length(self) -> int:
        return self.num_tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        # at least the number of tokens, so that masks fit
        return max(self.most_tokens or 0, self.num_tokens + query_length), 0

    def get_max_length(self) -> int:
        return -1 if self.most_tokens is None else self.most_tokens

    # the name in transformers 5.16
    get_max_cache_shape = get_max_length

    def reset(self) -> None:
        for name in self.kept:
            setattr(self, name, None)
        self.is_initialized, self.num_tokens = False, 0

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse to remove tokens.

        Raises:
            UnsupportedBackendError: `tokens_to_remove` is not 0.
        """
        if tokens_to_remove:
            raise UnsupportedBackendError(
                "A layer of linear or memory-compressed attention keeps sums over tokens, and tokens cannot be removed "
                "from them. So this cache cannot be cropped, as assisted generation and prompt lookup do. Generate "
                "without them, or keep an earlier copy of the cache (copy.deepcopy)."
            )

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._choose(lambda states: states.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._choose(lambda states: states[indices])

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._choose(lambda states: states.index_select(0, beam_idx.to(states.device)))

    def _choose(self, rows: Any) -> None:
        if self.is_initialized:
            for name in self.kept:
                setattr(self, name, rows(getattr(self, name)))


class StateLayer(SummaryLayer):
    """The cache layer of linear attention: `keys` holds S and z of the tokens so far.

    `keys` is [B, H, F, D + 1] in float32, with z in the last column. `values` is the exponent of the sums, [B, H], if
    features have exponents; otherwise it is empty.
    most_tokens: number of tokens that the other layers of a static cache have room for; None: they grow.
    """

    def add(self, new: KeySum, num_tokens: int) -> KeySum | None:
        """Return the sum so far, or None, and add the sum of `num_tokens` new tokens."""
        exponent = new.sums.new_empty(new.sums.shape[0], 0) if new.exponent is None else new.exponent
        before = None
        if self.num_tokens:
            before = KeySum(self.keys, None if new.exponent is None else self.values)
            new = before.plus(new)
        if not self.is_initialized:
            self.lazy_initialization(new.sums, exponent)
        self.keys, self.values = new.sums, exponent if new.exponent is None else new.exponent
        self.num_tokens += num_tokens
        return before

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True


KEYLESS = (
    "A layer of linear or memory-compressed attention keeps sums over tokens, not their keys. Prefix tuning cannot "
    "give it keys; use prompt tuning or LoRA instead."
)


def attach_states(cache: Cache, num_layers: int, stateful: Mapping[int, Callable[[int | None], SummaryLayer]]) -> None:
    """Replace cache layers of a model by layers that keep sums; a second call does nothing.

    stateful: for the index of each such layer, a function that makes it, given the number of tokens that a static cache
        has room for (None: the cache grows).

    Raises:
        UnsupportedBackendError: a cache whose layers already hold keys, or are of an unknown type.
        InputError: a cache whose layers hold different numbers of tokens.
    """
    if cache.layer_class_to_replicate is not None:
        while len(cache.layers) < num_layers:
            cache.layers.append(cache.layer_class_to_replicate())
    for index, make in stateful.items():
        layer = cache.layers[index]
        if isinstance(layer, SummaryLayer):
            check_length(cache, index, layer)
            continue
        if type(layer) not in (DynamicLayer, StaticLayer):
            raise UnsupportedBackendError(
                f"Layer {index} keeps sums over tokens instead of their keys, but this cache has a "
                f"{type(layer).__name__} for it. Use a DynamicCache or a StaticCache, or pass no cache; layers of the "
                "model that follow a pattern then keep the keys of all tokens."
            )
        if layer.is_initialized and layer.keys.numel() and torch.as_tensor(layer.get_seq_length()).item():
            raise UnsupportedBackendError(KEYLESS)
        cache.layers[index] = make(layer.max_cache_len if isinstance(layer, StaticLayer) else None)


def check_length(cache: Cache, index: int, layer: SummaryLayer) -> None:
    """Raise InputError if the sums of a layer have more tokens than the first layer of the cache holds.

    This happens if a crop was refused by this layer after it had cropped the layers before.
    """
    first = cache.get_seq_length()
    if isinstance(first, int) and not torch.compiler.is_compiling() and layer.num_tokens > first:
        raise InputError(
            f"Layer 0 of this cache holds {first} tokens, but layer {index} holds sums over {layer.num_tokens} tokens: "
            "the cache was cropped, as assisted generation and prompt lookup do, but sums cannot be cropped. Pass an "
            "empty cache and the whole text."
        )
