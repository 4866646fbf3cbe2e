"""One layer of a cache that holds only what its pattern can still read, and the padding that all layers share."""

from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from hf_efficient_attn.errors import InputError, UnsupportedBackendError
from hf_efficient_attn.layout.host_copies import on_host


class Padding:
    """How many tokens at the start of each example are padding; shared by the layers of a cache.

    Attributes:
        num_tokens: int [batch]; None: there is none.
    """

    def __init__(self) -> None:
        self.num_tokens: Tensor | None = None

    def note(self, is_token: Tensor | None) -> None:
        """Count the padding of a mask, bool [batch, tokens], True = a token.

        Raises:
            InputError: masked tokens follow others.
        """
        known = None if is_token is None else on_host(is_token)
        if is_token is None or known is None or bool(known.all()):
            self.num_tokens = None
            return
        if bool((known[:, :-1] & ~known[:, 1:]).any()):
            raise InputError(
                "attention_mask masks tokens after others that it does not mask, but PatternCache takes padding only "
                "at the start. Pad on the left (tokenizer.padding_side = 'left'), or use the default cache."
            )
        self.num_tokens = (~is_token).sum(1)


class PatternLayer(DynamicLayer):
    """The keys and values of one layer, for the first `num_first` tokens and the last `left` ones.

    An example with fewer tokens has its keys at the end. With new keys appended, the pattern therefore reads on the
    axis of these keys what it reads on the axis of all tokens: distances within the band are unchanged, and the first
    tokens come first.

    Attributes:
        num_first, left: in tokens.
        cumulative_length: tokens seen so far, padding included.
    """

    is_croppable = False

    def __init__(self, num_first: int, left: int, padding: Padding) -> None:
        super().__init__()
        self.num_first = num_first
        self.left = left
        self.padding = padding
        self.cumulative_length = 0

    @property
    def has_dropped(self) -> bool:
        """Whether some token seen is no longer kept."""
        return self.keys is not None and self.keys.shape[-2] < self.cumulative_length

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return the kept keys and values with the new ones appended, [batch, heads, kept + new, head_dim]."""
        keys, values = super().update(key_states, value_states)
        self.cumulative_length += key_states.shape[-2]
        slots = self._kept_slots(keys.shape[-2], keys.device)
        if slots is not None:
            self.keys, self.values = _select(keys, slots), _select(values, slots)
        return keys, values

    def _kept_slots(self, num_slots: int, device: torch.device) -> Tensor | None:
        """Return which of the slots stay, [batch or 1, num_first + left]; None: all."""
        num_kept = self.num_first + self.left
        if num_slots <= num_kept:
            return None
        slots = torch.arange(num_slots - num_kept, num_slots, device=device)[None]
        first = self._first_slots(num_slots, device)
        slots = slots.expand(first.shape[0], -1)
        # an example with fewer tokens keeps all of them
        first = torch.minimum(first, slots[:, : self.num_first])
        return torch.cat([first, slots[:, self.num_first :]], 1)

    def _first_slots(self, num_slots: int, device: torch.device) -> Tensor:
        """Return the slots of the first tokens, [batch or 1, num_first]; with fewer of them, where they would be."""
        first = torch.arange(self.num_first, device=device)[None]
        if self.padding.num_tokens is None:
            return first
        num_tokens = self.cumulative_length - self.padding.num_tokens.to(device)
        return first + (num_slots - num_tokens).clamp(min=0)[:, None]

    def get_seq_length(self) -> int:
        """Return the number of tokens seen so far."""
        return self.cumulative_length

    def reset(self) -> None:
        """Forget everything."""
        self.keys = self.values = None
        self.is_initialized = False
        self.cumulative_length = 0
        self.padding.num_tokens = None

    def crop(self, tokens_to_remove: int) -> NoReturn:
        """Refuse: tokens that were dropped cannot come back.

        Raises:
            UnsupportedBackendError: always.
        """
        raise UnsupportedBackendError(
            "PatternCache cannot take tokens back, as assisted decoding and prompt lookup do: it has dropped the "
            "tokens that they would read. Generate with the default cache."
        )

    def activate_past_recording(self) -> NoReturn:
        """Refuse, as `crop` does."""
        self.crop(0)


def _select(states: Tensor, slots: Tensor) -> Tensor:
    if slots.shape[0] == 1:
        return states.index_select(2, slots[0])
    return states.gather(2, slots[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3]))
