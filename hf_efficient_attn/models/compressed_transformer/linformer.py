"""Linformer: keys and values are projected along the sequence to k keys and k values, to which queries attend.

    head = softmax(Q (E K)ᵀ / √D) (F V),  with E and F of k × n learned numbers

Q has all tokens, so the output is as long as the sequence, and a layer computes n · k scores per head instead of n².
Every head has its own E and F, or the heads of a layer share E and F (`headwise`), or E = F in a layer (`kv`) or in the
whole model (`layerwise`). A sequence of n < N tokens uses the first n columns.

There is no causal form: each of the k keys is a sum over the whole sequence, so a token would attend to later ones.

Source: Wang, Li, Khabsa, Fang, Ma (arXiv:2006.04768), equation 7 and section 4. The paper defines E as n × k and uses
it as k × n. The authors' code projects the hidden states before the maps of keys and values, with their bias added to
projected states (`projection_first`), and also projects padding (`projection_padding="ignore"`); our default sets
padding to zero before the projection, so that it changes nothing.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import initialization as init

from hf_efficient_attn.attention.layer import dense_attention
from hf_efficient_attn.errors import InputError
from hf_efficient_attn.models.mechanisms.sequences import MechanismAttention, Sequences, whole_rows
from hf_efficient_attn.models.parts.blocks import drop_rate

from .mechanism import by_strides, convolved, filled_slots, whole_strides, with_spare_stride, zeroed


class LengthMap(NamedTuple):
    """A map from n tokens to k places: its numbers, and a bias [k] or [H, k].

    Attributes:
        weight: a linear map, [k, N] or per head [H, k, N]; or a convolution over `stride` tokens, [D, D, stride] (out,
            in, token) or [H, D, D, stride]; None: the mean of `stride` tokens.
    """

    weight: Tensor | None
    bias: Tensor | None
    stride: int
    is_linear: bool


class LengthMaps(nn.Module):
    """The projection matrices of a layer, or of all layers; `forward` returns the map of keys and the map of values."""

    def __init__(self, config: Any, num_slots: int) -> None:
        super().__init__()
        self.std, self.is_linear = config.initializer_range, config.projection_type == "linear"
        self.stride = config.max_position_embeddings // num_slots
        heads = (config.num_attention_heads,) if config.projection_sharing == "none" else ()
        sizes = (num_slots, config.max_position_embeddings)
        if not self.is_linear:
            sizes = (config.head_dim, config.head_dim, self.stride)
        has_values = config.projection_sharing in ("none", "headwise")
        has_map, has_bias = config.projection_type != "mean", config.projection_bias

        def parameter(is_there: bool, *shape: int) -> nn.Parameter | None:
            return nn.Parameter(torch.empty(*heads, *shape)) if is_there else None

        self.key_map, self.key_bias = parameter(has_map, *sizes), parameter(has_bias, num_slots)
        # None if keys and values share a map
        self.value_map = parameter(has_map and has_values, *sizes)
        self.value_bias = parameter(has_bias and has_values, num_slots)

    def initialize(self) -> None:
        """Initialize matrices like all others of the model, as in the authors' code, and biases to 0."""
        for weight in (self.key_map, self.value_map):
            if weight is not None:
                init.normal_(weight, std=self.std)
        for bias in (self.key_bias, self.value_bias):
            if bias is not None:
                init.zeros_(bias)

    def forward(self) -> tuple[LengthMap, LengthMap]:
        # copies, because DeepSpeed's ZeRO-3 releases the parameters of a module when it has returned
        of_keys, of_values = (
            [None if each is None else each.clone() for each in pair]
            for pair in ((self.key_map, self.key_bias), (self.value_map, self.value_bias))
        )
        keys = LengthMap(*of_keys, self.stride, self.is_linear)
        if self.value_map is None:
            return keys, keys
        return keys, LengthMap(*of_values, self.stride, self.is_linear)


class LinformerAttention(MechanismAttention):
    """Attention to k projected keys and values."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.num_slots = config.slots_of_layer(layer_idx)
        is_shared = config.projection_sharing == "layerwise"
        # from the config, because the tensors cannot be compared: sharding passes copies of them
        self.has_one_map = config.projection_sharing in ("kv", "layerwise") or config.projection_type == "mean"
        self.length_maps = None if is_shared else LengthMaps(config, self.num_slots)

    def read_sequences(self, states: Tensor, sequences: Sequences, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        if self.config.projection_padding == "ignore":
            sequences = whole_rows()
        return super().read_sequences(states, sequences, **kwargs)

    def project(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        if self.config.projection_first:
            return self.q_proj(hidden_states), hidden_states
        return super().project(hidden_states)

    def read(
        self,
        states: Sequence[Tensor],
        real: Tensor | None,
        need_weights: bool,
        shared_maps: tuple[LengthMap, LengthMap] | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        query, *rest = states
        check_length(query.shape[1], self.config.max_position_embeddings)
        keys, values = shared_maps if self.length_maps is None else self.length_maps()
        rest = [zeroed(each, real) for each in rest]
        if not keys.is_linear and not need_weights:
            rest, real = with_spare_stride(rest, real, keys.stride)
        key = compress(rest[0], keys, real, self.head_dim)
        is_one = self.config.projection_first and self.has_one_map
        value = key if is_one else compress(rest[-1], values, real, self.head_dim)
        if self.config.projection_first:
            key, value = self.k_proj(key), self.v_proj(value)
        query, key, value = (self.heads(each) for each in (query, key, value))
        filled = None if keys.is_linear else filled_slots(real, keys.stride)
        allowed = None if filled is None else filled[:, None, None]
        out, weights = dense_attention(
            query, key, value, allowed, None, self.scaling, drop_rate(self.dropout), need_weights
        )
        return out.transpose(1, 2).flatten(2), weights

    def costs(self, num_keys: int) -> str:
        scores = num_keys * self.num_slots
        return (
            f"A layer of a Linformer computes {scores:,} scores per head for {num_keys:,} tokens (full attention "
            f"computes {num_keys**2:,}): every token attends to {self.num_slots:,} projected keys."
        )


def compress(states: Tensor, length_map: LengthMap, real: Tensor | None, head_dim: int) -> Tensor:
    """Return k projected states, [R, L, X] → [R, k, X], or one per stride, the last of which may have fewer tokens.

    states: zeros after the end of each sequence.
    """
    weight, bias = length_map.weight, length_map.bias
    if length_map.is_linear:
        weight = first_columns(weight, states.shape[1])
        if weight.ndim == 2:
            compressed = weight @ states
        else:
            by_head = states.unflatten(-1, (-1, head_dim))
            compressed = torch.einsum("hkl,rlhd->rkhd", weight, by_head).flatten(2)
    elif weight is None:
        real = states.new_ones(states.shape[:2]) if real is None else real.to(states.dtype)
        totals, counts = (
            by_strides(whole_strides(each, length_map.stride), length_map.stride).sum(2)
            for each in (states, real.unsqueeze(-1))
        )
        compressed = totals / counts.clamp(min=1)
    else:
        compressed = convolved(whole_strides(states, length_map.stride), weight)
    if bias is None:
        return compressed
    # an exported graph has one more slot, to which nothing attends
    bias = first_columns(pad(bias, (0, 1)), compressed.shape[1]).to(compressed.dtype)
    if bias.ndim == 1:
        return compressed + bias.unsqueeze(-1)
    of_heads = bias.T.unsqueeze(-1)
    return (compressed.unflatten(-1, (-1, head_dim)) + of_heads).flatten(2)


def first_columns(weight: Tensor, tokens: int) -> Tensor:
    """Return the first columns of a matrix, one per token, [..., N] → [..., n]."""
    if not torch.compiler.is_compiling():
        return weight[..., :tokens]
    # a slice would need a graph of its own for n = N
    return weight.index_select(-1, torch.arange(tokens, device=weight.device))


def check_length(tokens: int, most: int) -> None:
    """Raise InputError for a sequence longer than the projection matrices; nothing is checked while compiling."""
    if not torch.compiler.is_compiling() and tokens > most:
        raise InputError(
            f"A text has {tokens} tokens, but the projection matrices of Linformer layers have "
            f"max_position_embeddings={most} columns. Truncate to {most} tokens, or build a model with more."
        )
