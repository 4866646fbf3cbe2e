"""The layers of a `PatternCache`, for bands and for block top-k, and the record of padding that all layers share."""

from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from hf_efficient_attn.errors import InputError, UnsupportedBackendError
from hf_efficient_attn.layout.transfer import on_host

# A buffer with room for new tokens, so that a decoding step writes only these and does not copy the others.


# a buffer has room for ROOM_TOKENS new tokens, or for 1 / ROOM_PART of the tokens that it holds if that is more
ROOM_TOKENS = 32
ROOM_PART = 16


def kind_of(tokens: Tensor) -> tuple[Any, ...]:
    """Return what all tokens of one buffer must have in common: type, dtype, device, and sizes other than length."""
    batch_size, num_heads, _, head_dim = tokens.shape
    return type(tokens), tokens.dtype, tokens.device, batch_size, num_heads, head_dim


class RollingBuffer:
    """The first and the last tokens of a text, [batch, heads, tokens, head_dim], stored one after another.

    When tokens between them are dropped, the first tokens must move to slots that the current call still uses.
    `settle` moves them later, before the held tokens are used again.

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
        # the first tokens, if they have yet to be moved
        self.unmoved: Tensor | None = None

    def fits(self, new: Tensor) -> bool:
        """Return whether new tokens can be written into this buffer."""
        return kind_of(new) == self.kind

    def has_room(self, num_tokens: int) -> bool:
        """Return whether this many tokens can be written after those held."""
        if self.tokens.is_inference() != torch.is_inference_mode_enabled():
            return False
        return self.stop + num_tokens <= self.tokens.shape[2]

    def append(self, new: Tensor, num_kept: int) -> Tensor:
        """Return the held tokens with the new ones appended, a view that is valid until the next call.

        Args:
            num_kept: how many of these tokens to hold from now on: the first `num_first` and the last ones.
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
            # inference tensors may be written only in inference mode, and other tensors only outside it
            with torch.inference_mode(self.tokens.is_inference()):
                self.held.narrow(2, 0, self.num_first).copy_(first)


class Padding:
    """How many tokens at the start of each example are padding; shared by the layers of a cache.

    Attributes:
        num_tokens: int [batch]; None: there is no padding.
        most_tokens: the largest of these numbers.
    """

    def __init__(self) -> None:
        self.num_tokens: Tensor | None = None
        self.most_tokens = 0

    def note(self, is_token: Tensor | None) -> None:
        """Count the padding of a mask, bool [batch, tokens], True = a token.

        Raises:
            InputError: masked tokens follow unmasked ones.
        """
        known = None if is_token is None else on_host(is_token)
        if is_token is None or known is None or bool(known.all()):
            self.clear()
            return
        if bool((known[:, :-1] & ~known[:, 1:]).any()):
            raise InputError(
                "attention_mask masks tokens that follow unmasked ones, but PatternCache allows padding only at the "
                "start. Pad on the left (tokenizer.padding_side = 'left'), or use the default cache."
            )
        self.num_tokens = (~is_token).sum(1)
        self.most_tokens = int((~known).sum(1).max())

    def clear(self) -> None:
        """Record that there is no padding."""
        self.num_tokens, self.most_tokens = None, 0


class PatternLayer(DynamicLayer):
    """The keys and values of one layer, for the first `num_first` tokens and the last `left` ones.

    An example with fewer tokens has its keys at the end. The pattern therefore allows the same pairs on the axis of the
    kept and new keys as on the axis of all tokens: distances within the band are unchanged, and the first tokens come
    first.

    A decoding step writes its tokens into a buffer with room for them, and moves no tokens except the first ones. It
    returns a view, which the next step overwrites. Autograd and compilers keep references to their inputs, so they get
    copies.

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
        # for the keys and the values; empty if these are not stored in buffers
        self._buffers: tuple[RollingBuffer, ...] = ()

    @property  # type: ignore[override]
    def keys(self) -> Any:
        """The kept keys, [batch, heads, kept, head_dim]; None: there are none yet."""
        self._settle()
        return self._keys

    @keys.setter
    def keys(self, keys: Any) -> None:
        self._leave_buffers()
        self._keys = keys

    @property  # type: ignore[override]
    def values(self) -> Any:
        """The kept values, with the same shape as `keys`."""
        self._settle()
        return self._values

    @values.setter
    def values(self, values: Any) -> None:
        self._leave_buffers()
        self._values = values

    def _settle(self) -> None:
        """Move the first tokens in front of the others."""
        for buffer in self._buffers:
            buffer.settle()

    def _leave_buffers(self) -> None:
        """Stop writing new tokens into the buffers; the kept keys and values remain views of them."""
        if self._buffers:
            self._settle()
            self._buffers = ()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Initialize the layer without tokens, with the dtype and device of the new ones."""
        self.dtype, self.device = key_states.dtype, key_states.device
        # not through the properties, because the compiler before torch 2.13 cannot set them
        self._keys, self._values = key_states.new_empty(0), value_states.new_empty(0)
        self.is_initialized = True

    @property
    def has_dropped(self) -> bool:
        """Whether the layer has dropped a token."""
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
        """Return whether `update` can append the new tokens to buffers.

        There must be few new tokens, and some cached ones. If tokens are dropped, the first tokens of every example
        must be at the front. `cumulative_length` already includes the new tokens.
        """
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
        """Return what `update` returns, as views of buffers to which the next steps append."""
        # both buffers were made together and hold the same number of tokens
        if not self._buffers or not self._buffers[0].has_room(new_keys.shape[2]):
            self._buffers = (RollingBuffer(self.keys, self.num_first), RollingBuffer(self.values, self.num_first))
        of_keys, of_values = self._buffers
        num_kept = self.num_first + self.left
        joined = of_keys.append(new_keys, num_kept), of_values.append(new_values, num_kept)
        self._keys, self._values = of_keys.held, of_values.held
        return joined

    def _kept_slots(self, num_slots: int, device: torch.device) -> Tensor | None:
        """Return the slots to keep, [batch or 1, num_first + left]; None: all."""
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
        """Return the slots of the first tokens, [batch or 1, num_first]; missing tokens get the slots that follow."""
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
            "PatternCache cannot remove tokens from the end, as assisted decoding and prompt lookup do, because it has "
            "already dropped tokens that the remaining ones attend to. Generate with the default cache."
        )

    def activate_past_recording(self) -> NoReturn:
        """Refuse, as `crop` does."""
        self.crop(0)


def _select(states: Tensor, slots: Tensor) -> Tensor:
    if slots.shape[0] == 1:
        return states.index_select(2, slots[0])
    return states.gather(2, slots[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3]))


# A cache layer for attention to selected blocks: all keys and values, and the sum of the keys of each block.


# the memory of a layer grows by at least LEAST_GROWTH tokens, or by 1 / GROWTH of its length
LEAST_GROWTH, GROWTH = 512, 8


class BlockLayer(DynamicLayer):
    """The keys and values of all tokens, and the sum of the keys of each block of an example.

    Blocks are counted from an example's first token that is not padding. A decoding step adds its key to one sum, and
    writes keys and values into memory that is larger than needed, so that it does not copy the earlier ones.

    Attributes:
        block_tokens: how many tokens a block has.
        sums: [batch, key heads, blocks, head_dim], in float32 or wider, of the keys of the first `num_summed` slots;
            None: there are none.
        summed_padding: the number of padding tokens of each example when the keys were summed, int [batch]; None: none.
    """

    # None until the first update
    keys: Any
    values: Any

    def __init__(self, block_tokens: int, padding: Padding) -> None:
        super().__init__()
        self.block_tokens, self.padding = block_tokens, padding
        self._forget()

    def _forget(self) -> None:
        self.sums: Tensor | None = None
        self.num_summed = 0
        self.summed_padding: Tensor | None = None
        # the keys that the last `update` stored, and the memory that the keys and values are views of
        self._known: Tensor | None = None
        self._memory: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return all keys and values with the new ones appended, [batch, heads, cached + new, head_dim]."""
        if self.keys is not self._known:
            # other code has replaced the keys
            self._forget()
        if self._is_plain(key_states, value_states):
            self._append(key_states, value_states)
        else:
            super().update(key_states, value_states)
            self._memory = None
        self._known = self.keys
        return self.keys, self.values

    def _is_plain(self, *states: Tensor) -> bool:
        """Return whether new states may be written in place after the cached ones: not under autograd or a compiler."""
        if torch.compiler.is_compiling():
            return False
        held = (self.keys, self.values) if self.get_seq_length() else states
        tracked = torch.is_grad_enabled() and any(each.requires_grad for each in (*states, *held))
        return not tracked and all(new.dtype == old.dtype for new, old in zip(states, held, strict=True))

    def _append(self, *states: Tensor) -> None:
        """Write new keys and values after the cached ones."""
        if not self.is_initialized:
            self.lazy_initialization(*states)
        past = self.get_seq_length()
        length = past + states[0].shape[2]
        has_room = self._memory is not None and self._memory[0].shape[2] >= length
        if self._memory is None or not has_room or self._memory[0].is_inference() != torch.is_inference_mode_enabled():
            slots = length + max(LEAST_GROWTH, length // GROWTH)
            held = (self.keys, self.values)
            memory = [new.new_empty(*new.shape[:2], slots, new.shape[3]) for new in states]
            for each, old in zip(memory, held, strict=True):
                if past:
                    each[:, :, :past] = old
            self._memory = (memory[0], memory[1])
        for each, new in zip(self._memory, states, strict=True):
            each[:, :, past:length] = new
        self.keys, self.values = (each[:, :, :length] for each in self._memory)

    def means(self) -> Tensor:
        """Return the mean of the keys of each complete block, [batch, key heads, blocks, head_dim].

        The last block may be incomplete; its value is not a mean, and is not used.
        """
        self._sum_new_keys()
        assert self.sums is not None
        return self.sums / self.block_tokens

    def _sum_new_keys(self) -> None:
        """Add the keys that are not summed yet to the sums."""
        padding, length = self.padding.num_tokens, self.keys.shape[2]
        if self.sums is not None and not _are_equal(padding, self.summed_padding):
            self.sums, self.num_summed = None, 0
        self.summed_padding = padding
        num_blocks = -(-length // self.block_tokens)
        if self.sums is None:
            dtype = torch.promote_types(self.keys.dtype, torch.float32)
            self.sums = torch.zeros(
                *self.keys.shape[:2], num_blocks, self.keys.shape[3], dtype=dtype, device=self.keys.device
            )
        elif num_blocks > self.sums.shape[2]:
            more = self.sums.new_zeros(*self.sums.shape[:2], num_blocks - self.sums.shape[2], self.sums.shape[3])
            self.sums = torch.cat([self.sums, more], 2)
        self._add(self.num_summed, length, 0)
        self.num_summed = length

    def _add(self, first: int, stop: int, least_block: Tensor | int) -> None:
        """Add the keys of the slots from `first` to `stop` to the sums of their blocks, from block `least_block` on."""
        assert self.sums is not None
        positions = self.positions(torch.arange(first, stop, device=self.keys.device))
        numbers = torch.div(positions, self.block_tokens, rounding_mode="floor")
        left_out = ((numbers < 0) | (numbers < least_block))[:, None, :, None]
        keys = self.keys[:, :, first:stop].detach().to(self.sums.dtype).masked_fill(left_out, 0.0)
        self.sums = self.sums.scatter_add(2, numbers.clamp(min=0)[:, None, :, None].expand_as(keys), keys)

    def positions(self, slots: Tensor) -> Tensor:
        """Return the position of each slot in the example's text, int [batch or 1, slots]; negative for padding."""
        if self.summed_padding is None:
            return slots[None]
        return slots - self.summed_padding.to(slots.device)[:, None]

    def reorder_cache(self, beam_idx: Any) -> None:
        """Reorder the examples, for beam search."""
        super().reorder_cache(beam_idx)
        self._take(lambda each: each.index_select(0, beam_idx.to(each.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each example."""
        super().batch_repeat_interleave(repeats)
        self._take(lambda each: each.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some examples."""
        super().batch_select_indices(indices)
        self._take(lambda each: each[indices])

    def _take(self, function: Any) -> None:
        """Apply the reordering of the keys to the sums."""
        self.sums = None if self.sums is None else function(self.sums)
        self.summed_padding = None if self.summed_padding is None else function(self.summed_padding)
        self._known, self._memory = self.keys, None

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last -`tokens_to_remove` tokens, and their keys from the sums."""
        was_known = self.keys is self._known
        super().crop(tokens_to_remove)
        if not was_known:
            self._forget()
        self._known, length = self.keys, self.get_seq_length()
        if self.sums is None or length >= self.num_summed:
            return
        # the block of the first removed slot, in each example: its sum is computed again, and later ones are 0
        last = torch.div(
            self.positions(torch.tensor([length], device=self.keys.device)), self.block_tokens, rounding_mode="floor"
        )
        blocks = torch.arange(self.sums.shape[2], device=self.sums.device)
        self.sums = self.sums.masked_fill((blocks >= last)[:, None, :, None], 0.0)
        self._add(max(0, length - self.block_tokens), length, last)
        self.num_summed = length

    def reset(self) -> None:
        """Forget everything."""
        self.keys = self.values = None
        self.is_initialized = False
        self._forget()
        self.padding.clear()


def _are_equal(one: Tensor | None, other: Tensor | None) -> bool:
    """Return whether two tensors of padding counts are the same."""
    if one is None or other is None:
        return one is other
    return one is other or (one.shape == other.shape and torch.equal(one, other.to(one.device)))
