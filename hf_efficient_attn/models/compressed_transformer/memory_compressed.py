"""Memory-compressed attention: a strided convolution makes one key and one value of several tokens.

    head = softmax(Q conv(K)ᵀ / √D) conv(V),  with kernels of f tokens and stride f

Slot j is made of the keys and values of the tokens j · f … j · f + f - 1, so a head computes n²/f scores. In a causal
layer a query attends to the slots whose last token is not after it: to its own slot only when that is complete, and to
nothing at all before token f - 1, unless there is a null key. T-DMCA has layers of this kind between layers whose
tokens attend to their own block of 256 tokens.

Slots are counted from the first token of each sequence. In a bidirectional layer, queries attend to the last slot of a
sequence even if it has fewer tokens; it is filled up with zeros.

Source: Liu et al., "Generating Wikipedia by Summarizing Long Sequences" (arXiv:1801.10198), section 4.2.3, which says
neither whether kernels mix heads, nor what the first tokens attend to. The authors' library compresses hidden states
before it maps them to keys, and puts the first token before the slots. The package memory-compressed-attention has one
convolution for keys and values, scales scores by hidden_size^-½, and fills up the first slot instead of the last.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import initialization as init
from transformers.cache_utils import Cache

from hf_efficient_attn.attention.explanation import LayerRequest
from hf_efficient_attn.attention.functional import attention
from hf_efficient_attn.attention.layer import dense_attention
from hf_efficient_attn.errors import InputError, UnsupportedBackendError
from hf_efficient_attn.models.base import backend_of
from hf_efficient_attn.models.mechanisms.sequences import MechanismAttention, Sequences, in_front_of_padding, whole_rows
from hf_efficient_attn.models.mechanisms.state_cache import SummaryLayer
from hf_efficient_attn.models.parts.blocks import drop_rate
from hf_efficient_attn.patterns.bands import CompressedKeys

from .mechanism import StrideConvolution, filled_slots, whole_strides, with_spare_stride, zeroed


class MemoryCompressedAttention(MechanismAttention):
    """Attention to one key for every few tokens, bidirectional or causal."""

    # a cache holds slots instead of keys, see `SummaryLayer`
    keeps_sums = True

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.stride = config.compression_tokens
        width, groups = config.hidden_size, config.num_attention_heads if config.compression_by_head else 1
        self.key_conv, self.value_conv = (
            StrideConvolution(width, width, self.stride, self.stride, groups=groups) for _ in range(2)
        )
        self.null_key = self.null_value = None
        if config.compression_null_key:
            self.null_key, self.null_value = (nn.Parameter(torch.zeros(width)) for _ in range(2))

    def initialize(self) -> None:
        """Set null keys and values to 0; maps and convolutions start like the other matrices of the model."""
        if self.null_key is not None:
            init.zeros_(self.null_key)
            init.zeros_(self.null_value)

    def forward(
        self, hidden_states: Tensor, sequences: Sequences, cache: Cache | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        if cache is None:
            return super().forward(hidden_states, sequences, **kwargs)
        # a cache has one sequence per row, which continues in the next call
        rows = sequences
        if sequences.real is not None:
            rows = in_front_of_padding(sequences.real)
        elif sequences.is_packed:
            rows = whole_rows()
        if sequences.is_packed:
            (states,), (group,) = rows.split(hidden_states), rows.groups
            _, key, value = (zeroed(each, group.real) for each in self.project(zeroed(states, group.real)))
            self._cached(cache, self.heads(key), self.heads(value), group.real)
            return super().forward(hidden_states, sequences, **kwargs)
        return super().forward(hidden_states, rows, cache=cache, **kwargs)

    def attend(
        self, hidden_states: Tensor, real: Tensor | None, need_weights: bool, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        # padding may have states that are not finite, and would make the gradients of the maps NaN
        return super().attend(zeroed(hidden_states, real), real, need_weights, **kwargs)

    def read(
        self,
        states: Sequence[Tensor],
        real: Tensor | None,
        need_weights: bool,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        query, *rest = (zeroed(each, real) for each in states)
        if cache is None and not need_weights:
            rest, real = with_spare_stride(rest, real, self.stride)
        query, key, value = (self.heads(each) for each in (query, *rest))
        start = None
        if cache is None:
            key, value = self._made(key, self.key_conv), self._made(value, self.value_conv)
        else:
            key, value, start = self._cached(cache, key, value, real)
        if self.null_key is not None:
            key, value = _behind(self.null_key, key), _behind(self.null_value, value)
        if not self.is_causal or start is not None or need_weights or torch.compiler.is_exporting():
            allowed = self._allowed(query, key.shape[2], real, start)
            options = (self.scaling, drop_rate(self.dropout), need_weights)
            out, weights = dense_attention(query, key, value, allowed, None, *options)
            return out.transpose(1, 2).flatten(2), weights
        out = attention(
            query,
            key,
            value,
            CompressedKeys(self.stride, self.stride),
            scale=self.scaling,
            dropout=drop_rate(self.dropout),
            backend=backend_of(self.config),
            # the null key counts as a slot before the sequence
            query_offset=None if self.null_key is None else self.stride,
            cross=True,
        )
        return out.transpose(1, 2).flatten(2), None

    def _made(self, states: Tensor, conv: nn.Module) -> Tensor:
        """Return the slots of tokens, the last one filled up with zeros: [R, h, L, D] → [R, h, ⌈L / f⌉, D]."""
        strides = whole_strides(states.transpose(1, 2).flatten(2), self.stride).mT
        return self.heads(conv(strides).mT)

    def _cached(
        self, cache: Cache, key: Tensor, value: Tensor, real: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the slots of all tokens, [B, H, S, D] each, and how many tokens rows had before, [B]; None: none."""
        make = (lambda states: self._made(states, self.key_conv), lambda states: self._made(states, self.value_conv))
        return cache.layers[self.layer_idx].extend(key, value, real, make)

    def _allowed(self, query: Tensor, num_slots: int, real: Tensor | None, start: Tensor | None) -> Tensor | None:
        """Return which slots are allowed, bool that broadcasts to [R, H, L, S], the null key first; None: all."""
        has_null = self.null_key is not None
        if not self.is_causal:
            filled = filled_slots(real, self.stride)
            return None if filled is None else pad(filled, (int(has_null), 0), value=True)[:, None, None]
        places = torch.arange(query.shape[2], device=query.device)
        places = places if start is None else places + start.view(-1, 1, 1)
        complete = (places + 1) // self.stride + has_null
        return torch.arange(num_slots, device=query.device) < complete.unsqueeze(-1)

    def layer_request(self, num_keys: int, task: str | None) -> LayerRequest:
        slots = (num_keys + self.stride - 1) // self.stride
        raise UnsupportedBackendError(
            f"A layer of memory-compressed attention computes {num_keys * slots:,} scores per head for {num_keys:,} "
            f"tokens, about half if causal (full attention computes {num_keys**2:,}): one key stands for "
            f"{self.stride:,} tokens. explain(CompressedKeys({self.stride}, {self.stride}), {num_keys}, {slots}, "
            "cross=True) shows which backend computes a causal layer; a bidirectional layer is computed densely."
        )


def _behind(null: Tensor, states: Tensor) -> Tensor:
    """Return states with a vector per head before them, [H · D] and [R, H, S, D] → [R, H, S + 1, D]."""
    num_heads, head_dim = states.shape[1], states.shape[3]
    first = null.view(1, num_heads, 1, head_dim).expand(states.shape[0], -1, -1, -1)
    return torch.cat((first.to(states.dtype), states), 2)


# The layer of a cache that keeps the slots of memory-compressed attention: a key and a value for every few tokens.


# places after the complete slots, to which a step writes slots that are not complete yet
SPARE = 2


class SlotLayer(SummaryLayer):
    """The complete slots of each row, and the tokens since then: `keys` and `values`, [B, H, f - 1 + S, D] each.

    The first f - 1 places are for the tokens of the slot that is not complete; row b has counts[b] mod f such tokens,
    and counts[b] // f complete slots, slot j at place f - 1 + j. Rows with padding have other counts. `keys` and
    `values` are the first places of `held_keys` and `held_values`, which have room for more and, if no gradient is
    needed, are written in place: a step copies only its own tokens, unless the room is full and must be doubled.

    stride: f, the number of tokens of a slot.
    most_tokens: how many tokens there is room for; None: the room grows.
    """

    kept = ("held_keys", "held_values", "counts")

    def __init__(self, stride: int, most_tokens: int | None = None) -> None:
        super().__init__(most_tokens)
        self.stride = stride
        self.held_keys = self.held_values = self.counts = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Start without tokens; the states are [B, H, any number, D]."""
        self.dtype, self.device = key_states.dtype, key_states.device
        rows, heads, _, width = key_states.shape
        places = self.stride - 1 + self._room(0) + SPARE
        self.held_keys, self.held_values = (key_states.new_zeros(rows, heads, places, width) for _ in range(2))
        self.counts = torch.zeros(rows, dtype=torch.long, device=self.device)
        self._show(0)
        self.is_initialized = True

    def reset(self) -> None:
        super().reset()
        self.keys = self.values = None

    def extend(
        self, key: Tensor, value: Tensor, real: Tensor | None, make: Sequence[Callable[[Tensor], Tensor]]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Add tokens, and return the slots of all, [B, H, S, D], and the old number of tokens per row, [B]; None: none.

        Args:
            key, value: keys and values of the new tokens, [B, H, T, D].
            real: which of these are tokens, always the first ones of a row, bool [B, T]; None: all.
            make: the functions that make slots of keys and of values, [B, H, W, D] → [B, H, ⌈W / f⌉, D].

        Raises:
            InputError: more tokens than there is room for.
        """
        if self.most_tokens is not None and self.num_tokens + key.shape[2] > self.most_tokens:
            raise InputError(
                f"The cache has room for {self.most_tokens} tokens and holds {self.num_tokens}: {key.shape[2]} more "
                "do not fit. Give StaticCache a larger max_cache_len."
            )
        if not self.is_initialized:
            self.lazy_initialization(key, value)
        waiting, stride, before = self.stride - 1, self.stride, self.counts
        is_first = self.num_tokens == 0
        self.num_tokens += key.shape[2]
        self.counts = before + (key.shape[2] if real is None else real.sum(1))
        # tokens that wait for their slot, followed by the new ones
        places = torch.arange(waiting + key.shape[2], device=key.device)
        waited = (before % stride).unsqueeze(1)
        source = torch.where(places < waited, places, places + waiting - waited).clamp(max=len(places) - 1)
        is_token = places < waited + (self.counts - before).unsqueeze(1)
        # tokens that wait after this call
        done = (before // stride).unsqueeze(1)
        rest = (self.counts // stride).unsqueeze(1) * stride - done * stride
        rest = (rest + torch.arange(waiting, device=key.device)).clamp(max=len(places) - 1)
        made = torch.arange((len(places) + stride - 1) // stride, device=key.device)
        first = torch.arange(waiting, device=key.device).expand(len(done), -1)
        written = torch.cat((first, waiting + done + made), 1)
        self._make_room()
        for name, states, made_of in (("held_keys", key, make[0]), ("held_values", value, make[1])):
            held = getattr(self, name)
            tokens = taken(torch.cat((held[:, :, :waiting], states), 2), source)
            tokens = torch.where(is_token[:, None, :, None], tokens, 0)
            new = torch.cat((taken(tokens, rest), made_of(tokens)), 2)
            setattr(self, name, put(held, written, new))
        self._show(self.num_tokens)
        keys, values = (each[:, :, waiting:].to(key.dtype) for each in (self.keys, self.values))
        return keys, values, None if is_first else before

    def _make_room(self) -> None:
        """Make room for all slots; if there was too little, double it."""
        places = self.stride - 1 + self._room(self.num_tokens) + SPARE
        for name in ("held_keys", "held_values"):
            held = getattr(self, name)
            if held.shape[2] < places:
                wanted = max(places, 2 * held.shape[2]) if may_write(held) else places
                setattr(self, name, pad(held, (0, 0, 0, wanted - held.shape[2])))

    def _show(self, num_tokens: int) -> None:
        """Set `keys` and `values` to the places that `num_tokens` tokens need."""
        places = self.stride - 1 + self._room(num_tokens)
        self.keys, self.values = self.held_keys[:, :, :places], self.held_values[:, :, :places]

    def _choose(self, rows: Any) -> None:
        super()._choose(rows)
        if self.is_initialized:
            self._show(self.num_tokens)

    def _room(self, num_tokens: int) -> int:
        """Return S, the number of slots for `num_tokens` tokens, or for `most_tokens` if that is set; at least 1."""
        return max(1, (num_tokens if self.most_tokens is None else self.most_tokens) // self.stride)


def taken(states: Tensor, places: Tensor) -> Tensor:
    """Return the states at each row's places, [B, H, N, D] and [B, M] → [B, H, M, D]."""
    index = places[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3])
    return states.gather(2, index)


def put(held: Tensor, places: Tensor, new: Tensor) -> Tensor:
    """Return `held`, [B, H, N, D], with new states [B, H, M, D] at each row's places, [B, M]; see `may_write`."""
    index = places[:, None, :, None].expand(new.shape)
    new = new.to(held.dtype)
    return held.scatter_(2, index, new) if may_write(held) else held.scatter(2, index, new)


def may_write(held: Tensor) -> bool:
    """Return whether a tensor may be written in place: no backward pass or compiled graph needs its old values."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    return not held.is_inference() or torch.is_inference_mode_enabled()
