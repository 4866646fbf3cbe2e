"""One layer of a cache that holds only what its pattern can still read, and the padding that all layers share."""

from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from hf_efficient_attn.attention.rolling_buffer import ROOM_TOKENS, RollingBuffer, kind_of
from hf_efficient_attn.errors import InputError, UnsupportedBackendError
from hf_efficient_attn.layout.transfer import on_host


class Padding:
    """How many tokens at the start of each example are padding; shared by the layers of a cache.

    Attributes:
        num_tokens: int [batch]; None: there is none.
        most_tokens: the largest of them.
    """

    def __init__(self) -> None:
        self.num_tokens: Tensor | None = None
        self.most_tokens = 0

    def note(self, is_token: Tensor | None) -> None:
        """Count the padding of a mask, bool [batch, tokens], True = a token.

        Raises:
            InputError: masked tokens follow others.
        """
        known = None if is_token is None else on_host(is_token)
        if is_token is None or known is None or bool(known.all()):
            self.clear()
            return
        if bool((known[:, :-1] & ~known[:, 1:]).any()):
            raise InputError(
                "attention_mask masks tokens after others that it does not mask, but PatternCache takes padding only "
                "at the start. Pad on the left (tokenizer.padding_side = 'left'), or use the default cache."
            )
        self.num_tokens = (~is_token).sum(1)
        self.most_tokens = int((~known).sum(1).max())

    def clear(self) -> None:
        """Note that there is no padding."""
        self.num_tokens, self.most_tokens = None, 0


class PatternLayer(DynamicLayer):
    """The keys and values of one layer, for the first `num_first` tokens and the last `left` ones.

    An example with fewer tokens has its keys at the end. With new keys appended, the pattern therefore reads on the
    axis of these keys what it reads on the axis of all tokens: distances within the band are unchanged, and the first
    tokens come first.

    A step of decoding writes its tokens into memory with room for them, and moves no others but the first ones. What it
    returns is a view, which the next step changes. Autograd and compilers keep what they read, and get copies.

    Attributes:
        num_first, left: in tokens.
        cumulative_length: tokens seen so far, padding included.
    """

    is_croppable = False

    def __init__(self, num_first: int, left: int, padding: Padding) -> None:
        self._forget()
        super().__init__()
        self.num_first = num_first
        self.left = left
        self.padding = padding
        self.cumulative_length = 0

    def _forget(self) -> None:
        self._keys: Any = None
        self._values: Any = None
        # of the keys and of the values, unless these are tensors of others
        self._buffers: tuple[RollingBuffer, ...] = ()

    @property  # type: ignore[override]
    def keys(self) -> Any:
        """The kept keys, [batch, heads, kept, head_dim]; None: none yet."""
        self._settle()
        return self._keys

    @keys.setter
    def keys(self, keys: Any) -> None:
        self._leave_buffers()
        self._keys = keys

    @property  # type: ignore[override]
    def values(self) -> Any:
        """The kept values, as `keys`."""
        self._settle()
        return self._values

    @values.setter
    def values(self, values: Any) -> None:
        self._leave_buffers()
        self._values = values

    def _settle(self) -> None:
        """Put the first tokens before the others."""
        for buffer in self._buffers:
            buffer.settle()

    def _leave_buffers(self) -> None:
        """Write no further tokens into the memory of those that are kept."""
        if self._buffers:
            self._settle()
            self._buffers = ()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Hold no tokens, of the dtype and on the device of new ones."""
        self.dtype, self.device = key_states.dtype, key_states.device
        # not through the properties, which compilers before torch 2.13 may not set
        self._keys, self._values = key_states.new_empty(0), value_states.new_empty(0)
        self.is_initialized = True

    @property
    def has_dropped(self) -> bool:
        """Whether some token seen is no longer kept."""
        return self._keys is not None and self._keys.shape[-2] < self.cumulative_length

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return the kept keys and values with the new ones appended, [batch, heads, kept + new, head_dim]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.cumulative_length += key_states.shape[-2]
        if self._is_step(key_states, value_states):
            return self._append(key_states, value_states)
        self._leave_buffers()
        keys = torch.cat([self._keys, key_states], dim=-2)
        values = torch.cat([self._values, value_states], dim=-2)
        slots = self._kept_slots(keys.shape[-2], keys.device)
        if slots is None:
            self._keys, self._values = keys, values
        else:
            self._keys, self._values = _select(keys, slots), _select(values, slots)
        return keys, values

    def _is_step(self, new_keys: Tensor, new_values: Tensor) -> bool:
        """Return whether a few tokens, counted already, follow others, all first tokens of which stand at the front."""
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or torch.jit.is_tracing():
            return False
        num_new = new_keys.shape[2]
        if num_new > ROOM_TOKENS or self._keys.numel() == 0:
            return False
        if self._buffers:
            is_alike = self._buffers[0].fits(new_keys) and self._buffers[1].fits(new_values)
        else:
            kinds = (kind_of(self._keys), kind_of(self._values))
            is_alike = kinds[0][0] is Tensor and kinds == (kind_of(new_keys), kind_of(new_values))
        num_held = self._keys.shape[2]
        if num_held + num_new <= self.num_first + self.left or self.num_first == 0:
            return is_alike
        num_tokens = self.cumulative_length - self.padding.most_tokens
        return is_alike and num_held >= self.num_first and num_tokens >= num_held + num_new

    def _append(self, new_keys: Tensor, new_values: Tensor) -> tuple[Tensor, Tensor]:
        """Return what `update` returns, in memory to which the next steps append."""
        # both hold as many tokens, and were made together
        if not self._buffers or not self._buffers[0].has_room(new_keys.shape[2]):
            self._buffers = (RollingBuffer(self.keys, self.num_first), RollingBuffer(self.values, self.num_first))
        of_keys, of_values = self._buffers
        num_kept = self.num_first + self.left
        joined = of_keys.append(new_keys, num_kept), of_values.append(new_values, num_kept)
        self._keys, self._values = of_keys.held, of_values.held
        return joined

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
        self._forget()
        self.is_initialized = False
        self.cumulative_length = 0
        self.padding.clear()

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
