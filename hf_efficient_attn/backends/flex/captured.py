"""Tensors that a kernel captures: values of terms, locations of tokens, and the blocks that queries have selected."""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.layout.call import AttentionCall
from hf_efficient_attn.layout.listed_keys import ChosenBlocks
from hf_efficient_attn.layout.selected_keys import AXIS, in_range
from hf_efficient_attn.layout.token_locations import TokenLocations


def captured(tensor: Tensor, dims: tuple[int, int]) -> Tensor:
    """Return a tensor as a kernel captures it; `dims` are its batch and its length.

    torch 2.13 may generate wrong code for CPUs if the size of a captured tensor varies. Padding batch and length to
    powers of two leaves few sizes; the added entries are never read.
    """
    if tensor.device.type != "cpu" or torch.compiler.is_compiling():
        return tensor
    added = [(1 << (size - 1).bit_length()) - size if dim in dims else 0 for dim, size in enumerate(tensor.shape)]
    return pad(tensor.detach(), [number for end in reversed(added) for number in (0, end)])


def by_pair(values: Tensor) -> Tensor:
    """Return the values of a term, [.., .., queries or 1, labels], with a second label if there is only one value.

    torch cannot compile the backward pass if a head has a single value for all of its pairs.
    """
    return pad(values, (0, 1)) if values.shape[2] == values.shape[3] == 1 and values.requires_grad else values


def captured_locations(locations: TokenLocations) -> TokenLocations:
    """Return the locations as a kernel captures them."""
    documents, positions = (_captured_numbers(tensor) for tensor in (locations.documents, locations.positions))
    is_global = None if locations.is_global is None else _captured_numbers(locations.is_global)
    return TokenLocations(documents, positions, is_global)


def _captured_numbers(tensor: Tensor) -> Tensor:
    return in_memory(tensor) if torch.compiler.is_compiling() else captured(tensor, (0, 1))


@torch.library.custom_op("hf_efficient_attn::in_memory", mutates_args=())
def in_memory(tensor: Tensor) -> Tensor:
    """Return a copy that a compiler must write to memory: kernels of flex cannot capture a tensor not yet computed."""
    return tensor.clone(memory_format=torch.contiguous_format)


@in_memory.register_fake
def _(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def kind_of(tensor: Tensor) -> object:
    """Return the properties of a captured tensor that a compiled kernel depends on."""
    sizes = (size if tensor.device.type == "cpu" else size > 1 for size in tensor.shape)
    return tensor.dtype, tuple(sizes)


@dataclass(frozen=True)
class SelectedBlocks:
    """The blocks that each query has selected, as a kernel looks them up.

    Attributes:
        numbers: int32 [batch or 1, heads or 1, choices, k]; a number that is too large stands for no block.
        heads_per_choice: how many neighbouring heads share a choice.
        queries_per_choice: how many neighbouring queries share a choice.
        block_tokens: how many keys a block has.
        counts_axis: whether blocks are counted from the first key; otherwise from the start of a document.
    """

    numbers: Tensor
    heads_per_choice: int
    queries_per_choice: int
    block_tokens: int
    counts_axis: bool

    @property
    def kind(self) -> object:
        """Everything about the choice that a compiled kernel depends on."""
        numbers = (self.heads_per_choice, self.queries_per_choice, self.block_tokens, self.counts_axis)
        return (*numbers, self.numbers.shape[3], kind_of(self.numbers))

    def holds(self, example: Tensor, head: Tensor, query: Tensor, place: Tensor) -> Tensor:
        """Return whether a query has selected the block of a key; `place` counts from the start of the first block."""
        block = place // self.block_tokens
        found = block < 0
        for number in range(self.numbers.shape[3]):
            found = found | (self._selected(example, head, query, number) == block)
        return found

    def _selected(self, example: Tensor, head: Tensor, query: Tensor, number: int) -> Tensor:
        """Return one of the blocks of a query."""
        sizes = (self.numbers.shape[0], self.numbers.shape[1])
        # a dimension of size 1 is read at 0; flex needs tensors as indices
        example = example if sizes[0] > 1 else example * 0
        own = head // self.heads_per_choice if sizes[1] > 1 else head * 0
        choice = query if self.queries_per_choice == 1 else query // self.queries_per_choice
        return self.numbers[example, own, choice, choice * 0 + number]


def selected_blocks_of(call: AttentionCall) -> SelectedBlocks:
    """Return the selected blocks of a call as its kernel captures them."""
    chosen, layout = cast(ChosenBlocks, call.chosen), call.layout
    numbers = in_range(chosen.blocks, layout.num_keys).to(torch.int32)
    return SelectedBlocks(
        in_memory(numbers) if torch.compiler.is_compiling() else captured(numbers, (0, 2)),
        layout.num_heads // numbers.shape[1],
        chosen.queries_per_choice,
        chosen.block_tokens,
        chosen.counted_from == AXIS,
    )
