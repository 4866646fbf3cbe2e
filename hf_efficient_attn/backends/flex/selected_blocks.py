"""Blocks of keys that were chosen by what tokens say: the blocks of scores that hold their pairs, and these pairs.

The blocks of scores are found on the device, from the list of every query, so that the host need not wait for it.
"""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.layout.block_table import CACHE_BYTES, Documents, are_listed, block_table, listed
from hf_efficient_attn.layout.cache import cached
from hf_efficient_attn.layout.call import AttentionCall
from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.layout.listed_keys import MOST_LISTED, ChosenBlocks
from hf_efficient_attn.layout.selected_keys import AXIS, ChosenKeys, in_range, of_heads, ranges
from hf_efficient_attn.layout.token_locations import TokenLocations
from hf_efficient_attn.layout.token_mask import TokenMask

# Tensors that a kernel captures: the values of terms, and the locations of the tokens of every example.


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
    """Return the values of a term, [.., .., queries or 1, labels], such that a pair finds its own by query or label.

    torch compiles no backward pass where a head has a single value for all of its pairs: it gets a second label.
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
    """Return a copy that a compiler has to write to memory, as kernels of flex capture no tensor still to compute."""
    return tensor.clone(memory_format=torch.contiguous_format)


@in_memory.register_fake
def _(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def kind_of(tensor: Tensor) -> object:
    """Return the properties of a captured tensor that a compiled kernel depends on."""
    sizes = (size if tensor.device.type == "cpu" else size > 1 for size in tensor.shape)
    return tensor.dtype, tuple(sizes)


BlockSize = tuple[int, int]


@dataclass(frozen=True)
class SelectedBlocks:
    """The blocks that each query has chosen, as a kernel reads them.

    Attributes:
        numbers: int32 [batch or 1, heads or 1, choices, k]; too large a number is that of no block.
        heads_per_choice: how many neighbouring heads share a choice.
        queries_per_choice: how many neighbouring queries do.
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
        """Return whether a query has chosen the block of the key at a place that blocks are counted from."""
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
    """Return the choice of a call as its kernel captures it."""
    chosen, layout = cast(ChosenBlocks, call.chosen), call.layout
    numbers = in_range(chosen.blocks, layout.num_keys).to(torch.int32)
    return SelectedBlocks(
        in_memory(numbers) if torch.compiler.is_compiling() else captured(numbers, (0, 2)),
        layout.num_heads // numbers.shape[1],
        chosen.queries_per_choice,
        chosen.block_tokens,
        chosen.counted_from == AXIS,
    )


def selected_tables(
    chosen: ChosenKeys,
    layout: Layout,
    tokens: TokenMask,
    documents: Documents | None,
    block_size: BlockSize,
    device: torch.device,
    needs_grad: bool,
) -> tuple[Tensor, ...]:
    """Return the tables of a BlockMask, made anew for every call: of its rows, and with gradients of its columns."""
    partial, full = blocks_with_pairs(chosen, layout, tokens, documents, block_size, device)
    of_rows = (*listed(partial), *listed(full))
    if not needs_grad:
        return of_rows
    return (*of_rows, *listed(partial.transpose(-1, -2)), *listed(full.transpose(-1, -2)))


def blocks_with_pairs(
    chosen: ChosenKeys,
    layout: Layout,
    tokens: TokenMask,
    documents: Documents | None,
    block_size: BlockSize,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Return which blocks of scores may hold both pairs that are read and others, and which hold none but the first.

    bool [batch or 1, heads or 1, rows, columns]; all others hold no pair that is read.
    """
    some, all_allowed = _allowed_blocks(layout, documents, block_size, device)
    of_selection = score_blocks(cast(ChosenBlocks, chosen), layout, tokens, block_size)
    touched, all_selected = (of_heads(each, layout.num_heads) for each in of_selection)
    full = all_allowed & all_selected
    return (some & touched) & ~full, full


@cached(CACHE_BYTES)
def _allowed_blocks(
    layout: Layout, documents: Documents | None, block_size: BlockSize, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return which blocks hold pairs that the pattern and the documents allow, and which hold no others."""
    table = block_table(layout, documents, block_size, device)
    full = are_listed(table.num_full, table.full)
    return are_listed(table.num_partial, table.partial) | full, full


def score_blocks(
    chosen: ChosenBlocks, layout: Layout, tokens: TokenMask, block_size: BlockSize
) -> tuple[Tensor, Tensor]:
    """Return which blocks of scores hold chosen pairs, and which hold no others, whatever the pattern and masks say.

    bool [batch or 1, choosing heads, rows, columns]. Blocks that reach beyond the last query or key hold others.
    """
    numbers, starts = (
        _each_once(in_range(chosen.blocks, layout.num_keys), layout.num_keys),
        chosen.starts(layout, tokens),
    )
    batch_size, num_heads = max(len(numbers), len(starts)), numbers.shape[1]
    most_heads = max(1, MOST_LISTED // max(1, layout.num_queries * numbers.shape[3]))
    found = []
    for first, stop in ranges(batch_size * num_heads, most_heads):
        row = torch.arange(first, stop, device=numbers.device)
        example, head = row // num_heads, row % num_heads
        own = numbers[example if len(numbers) > 1 else torch.zeros_like(example), head]
        if chosen.queries_per_choice > 1:
            own = own.repeat_interleave(chosen.queries_per_choice, 1)[:, : layout.num_queries]
        of_queries = starts[example if len(starts) > 1 else torch.zeros_like(example), :, None]
        found.append(_counted(own, of_queries, chosen.block_tokens, layout.num_keys, block_size))
    touched, whole = (torch.cat(parts).unflatten(0, (batch_size, num_heads)) for parts in zip(*found, strict=True))
    return touched, whole


def _each_once(numbers: Tensor, none: int) -> Tensor:
    """Return numbers [..., k] in ascending order, with `none` instead of those that are named before in their row.

    >>> _each_once(torch.tensor([3, 1, 3]), 9).tolist()
    [1, 3, 9]
    """
    numbers = numbers.sort(-1).values
    is_again = numbers[..., 1:] == numbers[..., :-1]
    return torch.cat([numbers[..., :1], numbers[..., 1:].masked_fill(is_again, none)], -1)


def _counted(
    numbers: Tensor, starts: Tensor, block_tokens: int, num_keys: int, block_size: BlockSize
) -> tuple[Tensor, Tensor]:
    """Return `score_blocks` of some heads, [heads, rows, columns], by counting the pairs in every block of scores.

    What a query reads of its row of blocks is counted where it begins and ends, however long it is.

    Args:
        numbers: the blocks of each query, [heads, queries, k].
        starts: the key from which they are counted, [heads, queries, 1].
    """
    num_heads, num_queries, _ = numbers.shape
    query_tokens, key_tokens = block_size
    num_rows, num_columns = -(-num_queries // query_tokens), -(-num_keys // key_tokens)
    begin = starts + numbers * block_tokens
    is_block = (numbers < num_keys) & (begin < num_keys)
    begin = begin.masked_fill(~is_block, 0)
    end = (begin + block_tokens).clamp(max=num_keys)
    first, last = begin // key_tokens, (end - 1) // key_tokens
    row = torch.arange(num_queries, device=numbers.device)[:, None] // query_tokens * (num_columns + 1)
    first_place, last_place = ((row + column).flatten(1) for column in (first, last))
    counts = torch.zeros(2, num_heads, num_rows * (num_columns + 1), dtype=torch.long, device=numbers.device)
    reads, missing = counts
    reads.scatter_add_(1, first_place, is_block.long().flatten(1))
    reads.scatter_add_(1, last_place + 1, -is_block.long().flatten(1))
    missing.scatter_add_(1, first_place, (is_block * (begin - first * key_tokens)).flatten(1))
    missing.scatter_add_(1, last_place, (is_block * ((last + 1) * key_tokens - end)).flatten(1))
    reads, missing = counts.view(2, num_heads, num_rows, num_columns + 1)[..., :-1]
    reads = reads.cumsum(-1)
    return reads > 0, reads * key_tokens - missing == query_tokens * key_tokens
