"""The layer of a cache in which new tokens are written after the others without moving them."""

from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.attention.cache_layers import Padding, PatternLayer

# least room for new tokens after those that a layer holds
ROOM_TOKENS = 32


class SpanLayer(PatternLayer):
    """The last keys and values of one layer, in buffers with room for more: writing new tokens moves no others."""

    def __init__(self, left: int) -> None:
        # without first tokens, a layer need not know how many tokens are padding
        super().__init__(0, left, Padding())
        self.key_buffer, self.value_buffer = Buffer(), Buffer()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return the kept keys and values with the new ones appended, [batch, heads, kept + new, head_dim]."""
        is_step = self.is_initialized and self.keys.numel() > 0 and key_states.shape[2] <= ROOM_TOKENS
        needs_grad = key_states.requires_grad or value_states.requires_grad
        if not is_step or needs_grad or torch.compiler.is_compiling():
            return super().update(key_states, value_states)
        self.cumulative_length += key_states.shape[2]
        keys, self.keys = self.key_buffer.append(self.keys, key_states, self.left)
        values, self.values = self.value_buffer.append(self.values, value_states, self.left)
        return keys, values


class Buffer:
    """Tokens [batch, heads, tokens, head_dim] with room for more after them."""

    def __init__(self) -> None:
        self.tokens: Tensor | None = None
        # the tokens held, a view that ends at index `stop`
        self.held: Tensor | None = None
        self.stop = 0

    def append(self, held: Tensor, new: Tensor, num_kept: int) -> tuple[Tensor, Tensor]:
        """Return the tokens held with the new ones appended, and the last `num_kept` of these; both are views.

        Args:
            held: the kept tokens that the last call returned; any other tensor, as after reordering beams, is copied
                first.
        """
        num_held, num_new = held.shape[2], new.shape[2]
        if held is not self.held or not self.has_room(num_new):
            room = max(ROOM_TOKENS, num_held // 16)
            self.tokens = held.new_empty(*held.shape[:2], num_held + room, held.shape[3])
            self.tokens[:, :, :num_held] = held
            self.stop = num_held
        self.tokens[:, :, self.stop : self.stop + num_new] = new
        self.stop += num_new
        joined = self.tokens[:, :, self.stop - num_held - num_new : self.stop]
        self.held = joined[:, :, max(0, joined.shape[2] - num_kept) :]
        return joined, self.held

    def has_room(self, num_tokens: int) -> bool:
        """Return whether this many tokens can be written after those held."""
        if self.tokens is None or (self.tokens.is_inference() and not torch.is_inference_mode_enabled()):
            return False
        return self.stop + num_tokens <= self.tokens.shape[2]
