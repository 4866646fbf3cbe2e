"""Memory with room for new tokens, so that a step of decoding writes these alone and moves no others."""

from typing import Any

import torch
from torch import Tensor

# least room for new tokens after those that a buffer holds
ROOM_TOKENS = 32
# by which part of the tokens held the room grows
ROOM_PART = 16


def kind_of(tokens: Tensor) -> tuple[Any, ...]:
    """Return what tokens that stand in one memory have in common."""
    batch_size, num_heads, _, head_dim = tokens.shape
    return type(tokens), tokens.dtype, tokens.device, batch_size, num_heads, head_dim


class RollingBuffer:
    """The first tokens of a text and its last ones, [batch, heads, tokens, head_dim], one after another.

    When tokens between them are dropped, the first ones belong where others stand, which the call that dropped them
    still reads. `settle` moves them there, before anybody reads what is held.

    Attributes:
        held: the tokens held, a view.
    """

    def __init__(self, held: Tensor, num_first: int) -> None:
        self.num_first = num_first
        num_held = held.shape[2]
        self.kind = kind_of(held)
        room = max(ROOM_TOKENS, num_held // ROOM_PART)
        self.tokens = held.new_empty(*held.shape[:2], num_held + room, held.shape[3])
        self.start, self.stop = 0, num_held
        self.held = self.tokens[:, :, :num_held]
        self.held.copy_(held)
        # those that have yet to be moved
        self.unmoved: Tensor | None = None

    def fits(self, new: Tensor) -> bool:
        """Return whether new tokens are like those held."""
        return kind_of(new) == self.kind

    def has_room(self, num_tokens: int) -> bool:
        """Return whether this many tokens can be written after those held."""
        if self.tokens.is_inference() != torch.is_inference_mode_enabled():
            return False
        return self.stop + num_tokens <= self.tokens.shape[2]

    def append(self, new: Tensor, num_kept: int) -> Tensor:
        """Return the tokens held with the new ones appended, a view, until the next call; hold the first and the last.

        Args:
            num_kept: how many of all these are held from now on.
        """
        first = self.unmoved
        self.settle()
        start, held_stop = self.start, self.stop
        self.stop += new.shape[2]
        self.tokens.narrow(2, held_stop, new.shape[2]).copy_(new)
        num_dropped = max(0, self.stop - start - num_kept)
        if num_dropped > 0:
            if self.num_first > 0:
                self.unmoved = self.held.narrow(2, 0, self.num_first).clone() if first is None else first
            self.start += num_dropped
        self.held = self.tokens.narrow(2, self.start, self.stop - self.start)
        return self.tokens.narrow(2, start, self.stop - start)

    def settle(self) -> None:
        """Move the first tokens to where they belong."""
        if self.unmoved is not None:
            first, self.unmoved = self.unmoved, None
            if self.tokens.is_inference() == torch.is_inference_mode_enabled():
                self.held.narrow(2, 0, self.num_first).copy_(first)
                return
            # whoever reads has left the mode in which this memory was made, and may write in it only there
            with torch.inference_mode(self.tokens.is_inference()):
                self.held.narrow(2, 0, self.num_first).copy_(first)
