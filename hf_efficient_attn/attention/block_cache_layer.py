"""One layer of a cache for attention to chosen blocks: all keys and values, and the sums of the keys of each block."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from hf_efficient_attn.attention.cache_layers import Padding

# by how many tokens the memory of a layer grows at least, and by which part of what it holds
LEAST_GROWTH, GROWTH = 512, 8


class BlockLayer(DynamicLayer):
    """The keys and values of all tokens, and of each block of an example the sum of its keys.

    Blocks are counted from an example's first token that is not padding. A step of decoding adds its key to one sum,
    and writes keys and values into memory that is larger than needed, so that it does not copy the earlier ones.

    Attributes:
        block_tokens: how many tokens a block has.
        sums: [batch, key heads, blocks, head_dim], in float32 or wider, of the keys of the first `num_summed` slots;
            None: there are none.
        summed_padding: how much padding each example had, int [batch]; None: none.
    """

    # None until there are any
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
        # the keys as this layer last left them, and the memory whose first slots they and the values are
        self._known: Tensor | None = None
        self._memory: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return all keys and values with the new ones appended, [batch, heads, cached + new, head_dim]."""
        if self.keys is not self._known:
            # somebody else has written them
            self._forget()
        if self._is_plain(key_states, value_states):
            self._append(key_states, value_states)
        else:
            super().update(key_states, value_states)
            self._memory = None
        self._known = self.keys
        return self.keys, self.values

    def _is_plain(self, *states: Tensor) -> bool:
        """Return whether new states may be written behind the cached ones; autograd and compilers keep theirs."""
        if torch.compiler.is_compiling():
            return False
        held = (self.keys, self.values) if self.get_seq_length() else states
        tracked = torch.is_grad_enabled() and any(each.requires_grad for each in (*states, *held))
        return not tracked and all(new.dtype == old.dtype for new, old in zip(states, held, strict=True))

    def _append(self, *states: Tensor) -> None:
        """Write new keys and values behind the cached ones."""
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
        """Return the means of the keys of all whole blocks, [batch, key heads, blocks, head_dim].

        A block that is not whole yet has a number of its own, which nobody reads.
        """
        self._sum_new_keys()
        assert self.sums is not None
        return self.sums / self.block_tokens

    def _sum_new_keys(self) -> None:
        """Add the keys to the sums that are not in them yet."""
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
        """Add the keys of some slots to the sums of their blocks, from `least_block` of each example on."""
        assert self.sums is not None
        positions = self.positions(torch.arange(first, stop, device=self.keys.device))
        numbers = torch.div(positions, self.block_tokens, rounding_mode="floor")
        left_out = ((numbers < 0) | (numbers < least_block))[:, None, :, None]
        keys = self.keys[:, :, first:stop].detach().to(self.sums.dtype).masked_fill(left_out, 0.0)
        self.sums = self.sums.scatter_add(2, numbers.clamp(min=0)[:, None, :, None].expand_as(keys), keys)

    def positions(self, slots: Tensor) -> Tensor:
        """Return the positions of slots in each example's text, int [batch or 1, slots]; negative ones are padding."""
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
        """Do with the sums what was done with the keys."""
        self.sums = None if self.sums is None else function(self.sums)
        self.summed_padding = None if self.summed_padding is None else function(self.summed_padding)
        self._known, self._memory = self.keys, None

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens, -`tokens_to_remove` of them; their keys leave the sums."""
        was_known = self.keys is self._known
        super().crop(tokens_to_remove)
        if not was_known:
            self._forget()
        self._known, length = self.keys, self.get_seq_length()
        if self.sums is None or length >= self.num_summed:
            return
        # the block that the last token left would be in, of each example
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
    """Return whether two numbers of padding tokens are the same."""
    if one is None or other is None:
        return one is other
    return one is other or (one.shape == other.shape and torch.equal(one, other.to(one.device)))
