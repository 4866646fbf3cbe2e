"""The layer of a cache that keeps the slots of memory-compressed attention: a key and a value for every few tokens."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hf_efficient_attn.errors import InputError

from .state_cache import SummaryLayer


class SlotLayer(SummaryLayer):
    """The complete slots of each row, and the tokens since then: `keys` and `values`, [B, H, f - 1 + S, D] each.

    The first f - 1 places are for the tokens of a slot that is not complete, of which row b has counts[b] mod f; slot j
    of counts[b] // f is at place f - 1 + j. Rows differ where they have padding.

    stride: f, the tokens of a slot.
    most_tokens: how many tokens there is room for; None: it grows.
    """

    kept = ("keys", "values", "counts")

    def __init__(self, stride: int, most_tokens: int | None = None) -> None:
        super().__init__(most_tokens)
        self.stride, self.counts = stride, None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Begin without tokens; the states are [B, H, any number, D]."""
        self.dtype, self.device = key_states.dtype, key_states.device
        rows, heads, _, width = key_states.shape
        places = self.stride - 1 + self._room(0)
        self.keys, self.values = (key_states.new_zeros(rows, heads, places, width) for _ in range(2))
        self.counts = torch.zeros(rows, dtype=torch.long, device=self.device)
        self.is_initialized = True

    def extend(
        self, key: Tensor, value: Tensor, real: Tensor | None, make: Sequence[Callable[[Tensor], Tensor]]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Add tokens, and return the slots of all, [B, H, S, D], and how many tokens each row had, [B]; None: none.

        Args:
            key, value: of new tokens, [B, H, T, D].
            real: which of these hold tokens, always the first ones of a row, bool [B, T]; None: all.
            make: what makes slots of keys and of values, [B, H, W, D] → [B, H, ⌈W / f⌉, D].

        Raises:
            InputError: more tokens than there is room for.
        """
        if self.most_tokens is not None and self.num_tokens + key.shape[2] > self.most_tokens:
            raise InputError(
                f"The cache has room for {self.most_tokens} tokens, and holds {self.num_tokens}: {key.shape[2]} more "
                "do not fit. Give StaticCache a larger max_cache_len."
            )
        if not self.is_initialized:
            self.lazy_initialization(key, value)
        waiting, stride, before = self.stride - 1, self.stride, self.counts
        is_first = self.num_tokens == 0
        self.num_tokens += key.shape[2]
        self.counts = before + (key.shape[2] if real is None else real.sum(1))
        # tokens that wait for their slot, behind them the new ones
        places = torch.arange(waiting + key.shape[2], device=key.device)
        waited = (before % stride).unsqueeze(1)
        source = torch.where(places < waited, places, places + waiting - waited).clamp(max=len(places) - 1)
        is_token = places < waited + (self.counts - before).unsqueeze(1)
        # those that wait afterwards
        done = (before // stride).unsqueeze(1)
        rest = (self.counts // stride).unsqueeze(1) * stride - done * stride
        rest = (rest + torch.arange(waiting, device=key.device)).clamp(max=len(places) - 1)
        slots = torch.arange(self._room(self.num_tokens), device=key.device)
        held = self.keys.shape[2] - waiting
        found = []
        for name, states, made_of in (("keys", key, make[0]), ("values", value, make[1])):
            old = getattr(self, name)
            tokens = taken(torch.cat((old[:, :, :waiting], states), 2), source)
            tokens = torch.where(is_token[:, None, :, None], tokens, 0)
            all_slots = torch.cat((old[:, :, waiting:], made_of(tokens)), 2)
            chosen = torch.where(slots < done, slots, slots - done + held).clamp(max=all_slots.shape[2] - 1)
            found.append(taken(all_slots, chosen))
            setattr(self, name, torch.cat((taken(tokens, rest), found[-1]), 2))
        return found[0], found[1], None if is_first else before

    def _room(self, num_tokens: int) -> int:
        """Return S, of how many slots there is room after so many tokens, at least 1."""
        return max(1, (num_tokens if self.most_tokens is None else self.most_tokens) // self.stride)


def taken(states: Tensor, places: Tensor) -> Tensor:
    """Return what is at each row's places, [B, H, N, D] and [B, M] → [B, H, M, D]."""
    index = places[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3])
    return states.gather(2, index)
