"""The layer of a cache that keeps the slots of memory-compressed attention: a key and a value for every few tokens."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.errors import InputError
from hf_efficient_attn.models.mechanisms.state_cache import SummaryLayer

# places behind those of complete slots, to which a step writes what is none yet
SPARE = 2


class SlotLayer(SummaryLayer):
    """The complete slots of each row, and the tokens since then: `keys` and `values`, [B, H, f - 1 + S, D] each.

    The first f - 1 places are for the tokens of a slot that is not complete, of which row b has counts[b] mod f; slot j
    of counts[b] // f is at place f - 1 + j. Rows differ where they have padding. Both are the first places of
    `held_keys` and `held_values`, which have room for more, and are written in place where no gradient is asked for: a
    step copies nothing but its own tokens, unless the room is full, which then is doubled.

    stride: f, the tokens of a slot.
    most_tokens: how many tokens there is room for; None: it grows.
    """

    kept = ("held_keys", "held_values", "counts")

    def __init__(self, stride: int, most_tokens: int | None = None) -> None:
        super().__init__(most_tokens)
        self.stride = stride
        self.held_keys = self.held_values = self.counts = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Begin without tokens; the states are [B, H, any number, D]."""
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
        """Hold places for all slots, twice as many as before if there were too few."""
        places = self.stride - 1 + self._room(self.num_tokens) + SPARE
        for name in ("held_keys", "held_values"):
            held = getattr(self, name)
            if held.shape[2] < places:
                wanted = max(places, 2 * held.shape[2]) if may_write(held) else places
                setattr(self, name, pad(held, (0, 0, 0, wanted - held.shape[2])))

    def _show(self, num_tokens: int) -> None:
        """Let `keys` and `values` be what is held of so many tokens."""
        places = self.stride - 1 + self._room(num_tokens)
        self.keys, self.values = self.held_keys[:, :, :places], self.held_values[:, :, :places]

    def _choose(self, rows: Any) -> None:
        super()._choose(rows)
        if self.is_initialized:
            self._show(self.num_tokens)

    def _room(self, num_tokens: int) -> int:
        """Return S, of how many slots there is room after so many tokens, at least 1."""
        return max(1, (num_tokens if self.most_tokens is None else self.most_tokens) // self.stride)


def taken(states: Tensor, places: Tensor) -> Tensor:
    """Return what is at each row's places, [B, H, N, D] and [B, M] → [B, H, M, D]."""
    index = places[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3])
    return states.gather(2, index)


def put(held: Tensor, places: Tensor, new: Tensor) -> Tensor:
    """Return what is held, [B, H, N, D], with new states [B, H, M, D] at each row's places, [B, M]; see `may_write`."""
    index = places[:, None, :, None].expand(new.shape)
    new = new.to(held.dtype)
    return held.scatter_(2, index, new) if may_write(held) else held.scatter(2, index, new)


def may_write(held: Tensor) -> bool:
    """Return whether a tensor may be written in place: no backward pass and no compiled graph needs it as it was."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    return not held.is_inference() or torch.is_inference_mode_enabled()
