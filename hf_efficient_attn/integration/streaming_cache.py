"""Positions that count slots of a cache: how a model rotates its keys, and a cache layer that rotates some further.

Xiao et al. 2023, "Efficient Streaming Language Models with Attention Sinks", section 3.2.
"""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from hf_efficient_attn.errors import ConfigurationError, UnsupportedBackendError
from hf_efficient_attn.integration.cache_layers import Padding, PatternLayer
from hf_efficient_attn.integration.forward_context import CACHE_ARGUMENT, given_cache
from hf_efficient_attn.messages import shown

TEXT, CACHE = "text", "cache"
# types of RoPE whose angles are the position times frequencies that do not depend on the length
PLAIN_ROPE = ("default", "linear", "llama3", "proportional")
# position 0, at which RoPE changes nothing, and a position at which most frequencies have rotated the keys
PROBED = (0, 100)
# the tolerance of key comparisons in machine epsilons, and the share of values that may differ by more
ROUNDINGS, ROUNDED_SHARE = 8, 0.05


@dataclass(frozen=True)
class KeyRotation:
    """The rotation of one layer's keys and queries, by its model's own RoPE.

    Attributes:
        embedding: the model's `rotary_emb`, which returns cos and sin of positions.
        apply: the model's `apply_rotary_pos_emb`.
        layer_type: the key of the frequencies, if layers of different types have different ones.
    """

    embedding: nn.Module
    apply: Callable[..., tuple[Tensor, Tensor]]
    layer_type: str | None = None

    def __call__(self, states: Tensor, steps: Tensor) -> Tensor:
        """Return keys or queries rotated further by `steps` positions, computed in float32 or wider.

        Args:
            states: [batch, heads, tokens, head_dim].
            steps: int [batch or 1, tokens or 1]; negative ones rotate back.
        """
        wide = states.to(torch.promote_types(states.dtype, torch.float32))
        return self.rounded(wide, steps).to(states.dtype)

    def rounded(self, states: Tensor, steps: Tensor) -> Tensor:
        """Return the rotated states, computed in the dtype of the states, as in the model."""
        kind = () if self.layer_type is None else (self.layer_type,)
        cos, sin = self.embedding(states, steps, *kind)
        rotary_dim = cos.shape[-1]
        rotary, rest = states[..., :rotary_dim], states[..., rotary_dim:]
        rotated, _ = self.apply(rotary, rotary[:, :1], cos, sin)
        return torch.cat([rotated, rest], -1)

    def __deepcopy__(self, memo: dict[int, Any]) -> "KeyRotation":
        """Return this object, because it is immutable and the tables belong to the model."""
        return self


@dataclass(frozen=True)
class QueryShifts:
    """The rotations that bring each of several new queries nearer to the first keys than in the text.

    Attributes:
        rotation: the rotation of the layer.
        shifts: the number of positions, int [batch or 1, queries], 0 or negative.
        is_first: bool [batch or 1, keys], True = a first key.
    """

    rotation: KeyRotation
    shifts: Tensor
    is_first: Tensor

    def applied(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the states with twice the head_dim.

        Queries have their shifted copy in the second half. First keys are in the second half, other keys and the values
        in the first half, with zeros in the rest.
        """
        is_first = self.is_first[:, None, :, None]
        query = torch.cat([query, self.rotation(query, self.shifts)], 3)
        key = torch.cat([key.masked_fill(is_first, 0), key.masked_fill(~is_first, 0)], 3)
        # fused kernels need values of the same head_dim
        return query, key, nn.functional.pad(value, (0, query.shape[3] - value.shape[3]))


class StreamingLayer(PatternLayer):
    """A `PatternLayer` in which the slots of keys are their positions.

    The distances to keys of the band do not change; the first keys come nearer by the number of tokens that were
    dropped between them and the band. The kept keys are never overwritten, so that rounding errors do not add up.
    """

    def __init__(self, num_first: int, left: int, padding: Padding, rotation: KeyRotation) -> None:
        super().__init__(num_first, left, padding)
        self.rotation = rotation
        # the shifts of the last call
        self.query_shifts: QueryShifts | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return the kept keys and values with the new ones appended, [batch, heads, kept + new, head_dim].

        For one query, the first keys are rotated further. Several queries have different distances to the first keys,
        so the attention function rotates the queries back instead, by `query_shifts`.

        Raises:
            UnsupportedBackendError: the call is compiled and has several queries.
        """
        self.query_shifts = None
        keys, values = super().update(key_states, value_states)
        num_new = key_states.shape[-2]
        # no example has dropped a token yet
        if self.cumulative_length - 1 <= self.num_first + self.left:
            return keys, values
        shifts = self._shifts(num_new, keys.device)
        if num_new == 1:
            # examples that have dropped tokens have their first keys at the front; the shift of the others is 0. The
            # kept keys are a copy of these, and do not change
            keys[:, :, : self.num_first] = self.rotation(keys[:, :, : self.num_first], -shifts)
            return keys, values
        if torch.compiler.is_compiling():
            raise UnsupportedBackendError(
                f'PatternCache(positions="cache") cannot be compiled for {num_new} new tokens, because some of them '
                "no longer attend to all tokens before them. Compile only steps of one token, and call the "
                "uncompiled model for other steps."
            )
        start = self._first_slots(keys.shape[-2], keys.device)[:, :1]
        slots = torch.arange(keys.shape[-2], device=keys.device)
        is_first = (slots >= start) & (slots < start + self.num_first)
        self.query_shifts = QueryShifts(self.rotation, shifts, is_first)
        return keys, values

    def _shifts(self, num_new: int, device: torch.device) -> Tensor:
        """Return the slots of the new queries minus their positions in the text, int [batch or 1, new]."""
        positions = torch.arange(self.cumulative_length - num_new, self.cumulative_length, device=device)[None]
        if self.padding.num_tokens is not None:
            positions = positions - self.padding.num_tokens.to(device)[:, None]
        return (self.num_first + self.left - positions).clamp(max=0)

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.query_shifts = None


def in_cache_positions(module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the queries, keys and values of a layer, with positions in the cache with which its model was called.

    If queries are shifted, head_dim doubles, and the values are padded with zeros.
    """
    cache: Any = given_cache(getattr(module, "config", None))
    layer = getattr(module, "layer_idx", None)
    if layer is None or layer >= len(getattr(cache, "layers", ())):
        return query, key, value
    shifts: QueryShifts | None = getattr(cache.layers[layer], "query_shifts", None)
    return (query, key, value) if shifts is None else shifts.applied(query, key, value)


def key_rotations(model: Any, config: Any, layers: Iterable[int]) -> dict[int, KeyRotation]:
    """Return the rotations of the given layers of a model by its `rotary_emb`; layers without RoPE are left out.

    The model computes one token at two positions, and the keys of each layer are compared.

    Args:
        config: the config of the text model.

    Raises:
        ConfigurationError: the keys depend on the position by something else than RoPE with fixed frequencies.
    """
    decoder = rotary_model(model, config)
    apply = getattr(sys.modules[type(decoder).__module__], "apply_rotary_pos_emb", None)
    if apply is None:
        refuse(f"{type(decoder).__name__} has no apply_rotary_pos_emb")
    kinds = getattr(decoder.rotary_emb, "rope_type", "default")
    for kind in kinds.values() if isinstance(kinds, dict) else (kinds,):
        if kind not in PLAIN_ROPE:
            refuse(f"its rope_type={shown(kind)} changes the frequencies in longer texts or scales the keys")
    if "mrope_section" in str(getattr(config, "rope_parameters", None)):
        refuse("its positions have several axes (M-RoPE)")
    if model.training:
        raise ConfigurationError(
            'PatternCache(positions="cache") got a model in training mode, whose dropout changes the keys that it '
            "compares. Call model.eval() first."
        )
    rotations, cached = {}, probed_layers(decoder, config)
    numbers = {getattr(module, "layer_idx", None) for module in decoder.modules()} - {None}
    if numbers != set(range(len(cached))):
        refuse(f"{len(numbers)} layers of the model share {len(cached)} cache layers")
    for layer in layers:
        kind = config.layer_types[layer] if isinstance(kinds, dict) else None
        rotation = KeyRotation(decoder.rotary_emb, apply, kind)
        if rotates_keys(rotation, cached[layer], layer):
            rotations[layer] = rotation
    return rotations


def rotary_model(model: Any, config: Any) -> Any:
    """Return the part of a model that has the `rotary_emb` of its text.

    Raises:
        ConfigurationError: no part has one.
    """
    for part in model.modules():
        if getattr(part, "config", None) is config and "rotary_emb" in part._modules:
            return part
    refuse(f"{type(model).__name__} has no rotary_emb")


@torch.no_grad()
def probed_layers(decoder: Any, config: Any) -> list[Any]:
    """Return the layers of a cache that holds one token in two examples, at the positions PROBED."""
    device = decoder.get_input_embeddings().weight.device
    cache = DynamicCache(config=config)
    # any token that is not special
    ids = torch.full((2, 1), config.vocab_size // 2, device=device)
    positions = torch.tensor(PROBED, device=device)[:, None]
    decoder(input_ids=ids, position_ids=positions, use_cache=True, **{CACHE_ARGUMENT: cache})
    return list(cache.layers)


def rotates_keys(rotation: KeyRotation, cached: Any, layer: int) -> bool:
    """Return True if a layer's keys at the positions PROBED differ by this rotation, False if they are equal.

    Raises:
        ConfigurationError: the keys differ in another way, or the values differ.
    """
    near, far = cached.keys[:1], cached.keys[1:]
    if near.is_meta or not float(near.abs().max()) > 0:
        refuse(f"the model has no weights, or all keys of layer {layer} are 0")
    if not are_close(cached.values[1:], cached.values[:1]):
        refuse(f"the values of layer {layer} depend on the position")
    if are_close(far, near):
        return False
    try:
        rotated = rotation.rounded(near, torch.tensor([PROBED[1:]], device=near.device))
    except (RuntimeError, TypeError, ValueError) as cause:
        refuse(f"its rotary_emb is not applied as usual ({type(cause).__name__}: {str(cause)[:80]})", cause)
    if not are_close(far, rotated):
        refuse(f"the keys of layer {layer} change from position to position by more than its rotary_emb")
    return True


def are_close(keys: Tensor, others: Tensor) -> bool:
    """Return whether nearly all values are equal up to rounding, also if a few are far larger than the others."""
    sizes = keys.abs()
    are_wrong = (keys - others).abs() > ROUNDINGS * torch.finfo(keys.dtype).eps * sizes.clamp(min=sizes.median())
    return float(are_wrong.double().mean()) <= ROUNDED_SHARE


def refuse(reason: str, cause: Exception | None = None) -> NoReturn:
    """Raise ConfigurationError for a model whose keys cannot be rotated further."""
    raise ConfigurationError(
        'PatternCache(positions="cache") needs keys that depend on the position only by RoPE with fixed frequencies, '
        f"but {reason}. Use PatternCache(model), which keeps the positions of the text."
    ) from cause
