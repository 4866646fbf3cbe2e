"""Block tables: which blocks of the score matrix hold allowed pairs, found from intervals, not from pairs."""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import cast

import torch
from torch import Tensor

from hf_efficient_attn.errors import InputError
from hf_efficient_attn.layout.cache import MEBIBYTE, cached
from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.layout.listed_keys import MOST_LISTED, ChosenBlocks
from hf_efficient_attn.layout.selected_keys import ChosenKeys, in_range, of_heads, ranges
from hf_efficient_attn.layout.token_mask import NO_MASK, Document, TokenMask
from hf_efficient_attn.layout.transfer import send
from hf_efficient_attn.patterns.intervals import Intervals, intersect, normalize, union

# An order of tokens that puts global tokens first, so that scattered ones lie in few blocks.


# global tokens are left where they are if they are more than this fraction of all tokens
MOST = 1 / 8


@dataclass(frozen=True)
class GlobalsFirst:
    """An order with some tokens first and all others after them, both in the order of their positions.

    >>> GlobalsFirst((2, 5), 7).positions().tolist()
    [2, 5, 0, 1, 3, 4, 6]
    >>> GlobalsFirst((2, 5), 7).places(((1, 4),))
    ((0, 1), (3, 5))

    Attributes:
        chosen: the sorted positions of the tokens that come first.
        num_tokens: the number of all tokens.
    """

    chosen: tuple[int, ...]
    num_tokens: int

    def positions(self) -> Tensor:
        """Return the position of the token at each place."""
        is_chosen = torch.zeros(self.num_tokens, dtype=torch.bool)
        is_chosen[list(self.chosen)] = True
        return torch.cat((torch.nonzero(is_chosen)[:, 0], torch.nonzero(~is_chosen)[:, 0]))

    def places(self, intervals: Intervals) -> Intervals:
        """Return the places of all positions in some intervals."""
        found = []
        for start, stop in intervals:
            first, last = bisect_left(self.chosen, start), bisect_left(self.chosen, stop)
            count = len(self.chosen)
            found += [(first, last), (count + start - first, count + stop - last)]
        return normalize(found)

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield (place, first position, last position) of parts of start … stop - 1 whose places are consecutive."""
        first, last = bisect_left(self.chosen, start), bisect_left(self.chosen, stop)
        begin = start
        for index in range(first, last + 1):
            end = self.chosen[index] if index < last else stop
            if begin < end:
                yield len(self.chosen) + begin - index, begin, end - 1
            if index < last:
                yield index, end, end
            begin = end + 1


def globals_first(layout: Layout, documents: tuple[tuple[Document, ...], ...] | None) -> GlobalsFirst | None:
    """Return the order that moves scattered global tokens of a whole sequence to its start.

    Return None if queries and keys are not one whole sequence, or if it has no such tokens or too many.

    documents: the documents of each example; None if every example is one whole document.
    """
    if layout.is_cross or layout.num_queries != layout.num_keys:
        return None
    found: set[int] = set()
    for document in {document for listed in documents or NO_MASK.documents(1, layout.num_keys) for document in listed}:
        own: set[int] = set()
        for pattern in set(layout.of_document(document).head_patterns()):
            # global blocks of tokens already fill blocks of the kernel
            own |= {each.position for each in pattern.global_positions() if each.block_tokens == 1}
        # the first tokens of a document already lie in few blocks, and one order moves the tokens of all examples
        if own != set(range(len(own))):
            found |= {document.start + position for position in own}
    chosen = tuple(sorted(found))
    if not chosen or len(chosen) > MOST * layout.num_keys:
        return None
    return GlobalsFirst(chosen, layout.num_keys)


Documents = tuple[tuple[Document, ...], ...]

CACHE_BYTES = 128 * MEBIBYTE
MAX_TABLE_BYTES = 4 * 1024 * MEBIBYTE


@dataclass(frozen=True, eq=False)
class BlockTable:
    """The key blocks of each row of query blocks, int32 [batch or 1, heads or 1, rows] and [..., rows, blocks].

    Attributes:
        num_partial, partial: how many blocks of a row hold both allowed and other pairs, and their indices, which come
            first in the row.
        num_full, full: the same for blocks that hold only allowed pairs.
    """

    num_partial: Tensor
    partial: Tensor
    num_full: Tensor
    full: Tensor


@cached(CACHE_BYTES)
def block_table(
    layout: Layout,
    documents: Documents | None,
    block_size: tuple[int, int],
    device: torch.device,
    order: GlobalsFirst | None = None,
) -> BlockTable:
    """Return the table for blocks of `block_size` = (queries, keys) tokens.

    Blocks that reach beyond the last query or key, and blocks of documents with holes, count as partial.

    Args:
        layout: if there are documents, its pattern must be the same at every length.
        documents: the documents of each example; None if every example is one whole document.
        order: the order of queries and keys; None for the order of their positions.

    Raises:
        InputError: the tables, with an entry for every pair of blocks, are larger than MAX_TABLE_BYTES.
    """
    examples = documents or NO_MASK.documents(1, layout.num_keys, layout.num_positions)
    groups = layout.head_groups()
    query_tokens, key_tokens = block_size
    num_rows, num_blocks = -(-layout.num_queries // query_tokens), -(-layout.num_keys // key_tokens)
    shape = (len(examples), len(groups), num_rows, num_blocks)
    if 8 * prod(shape) > MAX_TABLE_BYTES:
        raise InputError(
            f"The tables of blocks for {layout.num_queries:,} queries and {layout.num_keys:,} keys (examples: "
            f"{shape[0]}, patterns of heads: {shape[1]}) take {8 * prod(shape) / 2**30:,.0f} GiB; the limit is "
            f"{MAX_TABLE_BYTES / 2**30:,.0f} GiB. Use backend='blocked', a smaller batch or shorter inputs."
        )
    partial, full = (torch.zeros(shape, dtype=torch.int32) for _ in range(2))
    num_partial, num_full = (torch.zeros(shape[:3], dtype=torch.int32) for _ in range(2))
    for example, its_documents in enumerate(examples):
        for group, (head, _, _) in enumerate(groups):
            for row, (outer, inner) in enumerate(_rows(layout, its_documents, head, query_tokens, order)):
                touched = _touched(outer, key_tokens)
                inside = intersect(touched, _inside(inner, key_tokens))
                rest = _difference(touched, inside)
                place = (example, group, row)
                num_partial[place] = _write(partial[place], rest)
                num_full[place] = _write(full[place], inside)
    tables = (num_partial, partial, num_full, full)
    if len(groups) > 1:
        counts = torch.tensor([count for _, count, _ in groups])
        tables = tuple(table.repeat_interleave(counts, 1) for table in tables)  # type: ignore[assignment]
    # a blocking copy: the table is cached for all threads, and another stream might read it before it has arrived
    return BlockTable(*send(tables, device))


def _rows(
    layout: Layout, documents: tuple[Document, ...], head: int, block_tokens: int, order: GlobalsFirst | None
) -> list[tuple[Intervals, Intervals]]:
    """Return, for each row of blocks, the keys that any of its queries attends to, and those that all attend to."""
    num_rows = -(-layout.num_queries // block_tokens)
    outer: list[Intervals] = [()] * num_rows
    inner: list[Intervals] = [()] * num_rows
    num_seen = [0] * num_rows
    for document in documents:
        own = layout.of_document(document)
        if own.num_queries == 0:
            continue
        pattern = own.head_patterns()[head]
        first_query = document.query_start + own.query_offset - layout.query_offset
        for row, first, last in _row_parts(first_query, first_query + own.num_queries, block_tokens, order):
            bounds = (first + own.query_offset - first_query, last + own.query_offset - first_query, own.num_keys)
            outer[row] = union(outer[row], _placed(pattern.key_intervals(*bounds), document.start, order))
            if not document.has_holes:
                read = _placed(pattern.full_key_intervals(*bounds), document.start, order)
                inner[row] = intersect(inner[row], read) if num_seen[row] else read
                num_seen[row] += last - first + 1
    are_all = (seen == block_tokens for seen in num_seen)
    return [(some, each if is_all else ()) for some, each, is_all in zip(outer, inner, are_all, strict=True)]


def _row_parts(start: int, stop: int, block_tokens: int, order: GlobalsFirst | None) -> Iterator[tuple[int, int, int]]:
    """Yield (row of blocks, first query, last query) of parts of start … stop - 1 that are consecutive in one row."""
    for place, begin, end in ((start, start, stop - 1),) if order is None else order.runs(start, stop):
        for row in range(place // block_tokens, (place + end - begin) // block_tokens + 1):
            first = begin + max(0, row * block_tokens - place)
            yield row, first, min(end, begin + (row + 1) * block_tokens - 1 - place)


def _placed(intervals: Intervals, distance: int, order: GlobalsFirst | None) -> Intervals:
    """Return the places of intervals of positions that are counted from `distance`."""
    shifted = tuple((start + distance, stop + distance) for start, stop in intervals)
    return shifted if order is None else order.places(shifted)


def _touched(intervals: Intervals, block_tokens: int) -> Intervals:
    return normalize((start // block_tokens, -(-stop // block_tokens)) for start, stop in intervals)


def _inside(intervals: Intervals, block_tokens: int) -> Intervals:
    return normalize((-(-start // block_tokens), stop // block_tokens) for start, stop in intervals)


def _difference(intervals: Intervals, taken: Intervals) -> Intervals:
    edges = [0, *(edge for interval in taken for edge in interval), max((stop for _, stop in intervals), default=0)]
    left_over = tuple((start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop)
    return intersect(intervals, left_over)


def _write(row: Tensor, intervals: Intervals) -> int:
    """Write the numbers in `intervals` to the start of `row`, and return how many there are."""
    written = 0
    for start, stop in intervals:
        row[written : written + stop - start] = torch.arange(start, stop, dtype=row.dtype)
        written += stop - start
    return written


# Lists of the blocks that a kernel computes, in the format of BlockMask: a count and indices for each row of blocks.


def listed(is_listed: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many columns each row has, int32 [..., rows], and all columns with these first, [..., rows, columns].

    is_listed: which columns each row has, bool [..., rows, columns].
    """
    numbers = is_listed.to(torch.int32)
    columns = torch.argsort(numbers, dim=-1, descending=True, stable=True)
    return numbers.sum(-1, dtype=torch.int32), columns.to(torch.int32).contiguous()


def are_listed(counts: Tensor, indices: Tensor) -> Tensor:
    """Return which columns each row lists, bool [..., rows, columns].

    Args:
        counts: how many columns each row lists, [..., rows].
        indices: their indices, which come first in their row, [..., rows, columns].
    """
    num_columns = indices.shape[-1]
    is_entry = torch.arange(num_columns, device=indices.device) < counts[..., None]
    # entries that are not listed go to an extra column
    places = indices.masked_fill(~is_entry, num_columns).long()
    found = torch.zeros(*indices.shape[:-1], num_columns + 1, dtype=torch.bool, device=indices.device)
    return found.scatter_(-1, places, True)[..., :num_columns]


def by_column(counts: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many rows list each column, [..., columns], and all rows with these first, [..., columns, rows].

    torch computes this with vmap, which cannot be called within an operator. The arguments are those of `are_listed`.
    """
    return listed(are_listed(counts, indices).transpose(-1, -2))


# The blocks of scores that hold selected pairs, found on the device in every call.


BlockSize = tuple[int, int]


def selected_tables(
    chosen: ChosenKeys,
    layout: Layout,
    tokens: TokenMask,
    documents: Documents | None,
    block_size: BlockSize,
    device: torch.device,
    needs_grad: bool,
) -> tuple[Tensor, ...]:
    """Return the tables of a BlockMask for one call: those of its rows and, if gradients are needed, of its columns."""
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
    """Return which blocks of scores may be partial and which are full, bool [batch or 1, heads or 1, rows, columns].

    A full block holds only pairs that are both selected and allowed; a block that is neither holds no such pair.
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
    """Return which blocks hold pairs that the pattern and the documents allow, and which hold only such pairs."""
    table = block_table(layout, documents, block_size, device)
    full = are_listed(table.num_full, table.full)
    return are_listed(table.num_partial, table.partial) | full, full


def score_blocks(
    chosen: ChosenBlocks, layout: Layout, tokens: TokenMask, block_size: BlockSize
) -> tuple[Tensor, Tensor]:
    """Return which blocks of scores hold chosen pairs, and which hold only chosen pairs, before patterns and masks.

    Both are bool [batch or 1, choosing heads, rows, columns]. Blocks that reach beyond the last query or key are not
    among the latter.
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
    """Return numbers [..., k] in ascending order, with `none` in place of every repetition within a row.

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

    Each chosen block of keys is counted only where it begins and ends, so that its length costs nothing.

    Args:
        numbers: the chosen blocks of each query, [heads, queries, k].
        starts: the key from which the blocks of a query are counted, [heads, queries, 1].
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
