"""Compile a layout into a BlockLayout, without looking at all pairs.

Each partition is divided into rows of queries in its token order, and consecutive rows of the same form become one run.
If a pattern does not change along the sequence, only one row is looked at, and the others are copies of it.
"""

from collections.abc import Iterable, Iterator
from functools import cached_property, reduce
from math import gcd

import torch
from torch import Tensor

from hf_efficient_attn.layout.block_layout import BlockCosts, BlockLayout, CompiledPartition, Run, with_first_runs
from hf_efficient_attn.layout.block_rows import (
    MIN_GATHER_BLOCK,
    Budget,
    PatternPartition,
    QueryBlock,
    RunMasks,
    as_order,
    can_join,
    can_merge,
    neighbours,
    partitions,
    places_of,
    row_step,
    union_of_parts,
    without_small_gaps,
)
from hf_efficient_attn.layout.cache import MEBIBYTE, cached
from hf_efficient_attn.layout.dense_mask import num_mask_bytes
from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.patterns.intervals import Intervals, checked_intervals, complement, intersect, size
from hf_efficient_attn.patterns.pattern import Pattern

# a pattern with a longer period or gather block does not get blocks of that length
MAX_BLOCK_TOKENS = 512
# rows that attend to the same keys are computed as one block if its mask has at most this many entries
MAX_MERGED_PAIRS = 1 << 22
# the same limit for rows that attend to all keys of their order
MAX_MERGED_ORDER_PAIRS = 1 << 24
# the same limit for rows of invariant partitions: longer rows would not share their mask with others
MAX_MERGED_INVARIANT_PAIRS = 1 << 19
# rows with more pairs are split, either into the keys that all queries attend to and the rest, or by interval
MAX_WHOLE_PAIRS = 1 << 17
# near the ends of the sequence this many blocks are computed as one, which wastes some scores but saves masks and calls
EDGE_BLOCKS = 4
MAX_EDGE_TOKENS = 384
# intervals of at least this length that all queries of a row attend to are read in place, not gathered
LONG_INTERVAL = 1024
# if there are more of them than this, all are gathered, since each would need its own run
MAX_LONG_INTERVALS = 4
MAX_GATHER_BLOCK = 128
# copies of one row share one mask if they have more pairs than this together
LARGE_RUN = 1 << 20
CACHE_BYTES = 512 * MEBIBYTE


@cached(CACHE_BYTES)
def compile_layout(layout: Layout, costs: BlockCosts, device: torch.device) -> BlockLayout:
    """Return the block layout, which is cached by the values of the arguments.

    Args:
        costs: the lengths that blocks of queries may have, and their costs; a pattern made of blocks may use its own
            length.
        device: the device of the masks.

    Raises:
        MaskLimitError: the masks would take too much memory.
    """
    what = f"A {layout.pattern.kind} pattern over {layout.num_queries:,} queries and {layout.num_keys:,} keys"
    budget = Budget(what, num_mask_bytes(layout, 1))
    heads_of: dict[PatternPartition, list[int]] = {}
    for first, count, pattern in layout.head_groups():
        for partition in partitions(pattern, layout.extent):
            heads_of.setdefault(partition, []).extend(range(first, first + count))
    compiled = []
    for partition, heads in heads_of.items():
        runs = PartitionCompiler(partition, costs, budget).runs()
        rows = partition.rows(layout.query_offset)
        queries, keys = as_order(rows), as_order(partition.order.keys)
        compiled += [(rows, CompiledPartition(*place, queries, keys, runs)) for place in neighbours(heads) if runs]
    return with_first_runs(compiled, layout.num_heads, layout.num_queries).on(device)


class PartitionCompiler:
    """Compiles one partition of a pattern."""

    def __init__(self, partition: PatternPartition, costs: BlockCosts, budget: Budget) -> None:
        # with tensors as tables, since rows are looked up many times
        self.target = partition.target.with_tables(torch.tensor)
        self.order = partition.order
        self.local_offset = self.order.local_query_offset
        self.num_queries, self.num_keys = len(self.order.queries), len(self.order.keys)
        self.step = self.order.step
        self.block_tokens = costs.cheapest(set(map(self.possible, costs.lengths)), self.num_keys_of_block)
        self.masks = RunMasks(partition, budget)

    def possible(self, wished: int) -> int:
        """Return the possible block length for a desired one.

        For a periodic pattern, this is a multiple of the period. For another pattern made of blocks, it is the length
        of its blocks, since no two of them attend to the same keys.
        """
        local = self.order.local
        if local is None:
            return wished
        period, own = local.period, local.granularity
        if period is not None:
            return period * -(-wished // period) if period <= MAX_BLOCK_TOKENS else wished
        return own if MIN_GATHER_BLOCK <= own <= MAX_BLOCK_TOKENS else wished

    def num_keys_of_block(self, tokens: int) -> int:
        """Return how many keys a block of `tokens` queries in the middle of the sequence attends to."""
        first = self.num_queries // 2 // tokens * tokens
        return size(self.row(first, min(tokens, self.num_queries - first)).intervals)

    def runs(self) -> tuple[Run, ...]:
        """Return the runs that hold all pairs of the partition."""
        pattern_row = self.inner_row()
        first, last = self.inner_blocks(pattern_row)
        if first == last:
            return tuple(self.runs_at([(0, self.num_queries)])[0])
        start, stop = first * self.block_tokens, last * self.block_tokens
        intervals = tuple((begin + start, end + start) for begin, end in pattern_row)
        row = QueryBlock(
            start, self.block_tokens, intervals, self.is_full(self.bounds(start, self.block_tokens), intervals)
        )
        left, right = self.runs_at([(0, start), (stop, self.num_queries)])
        return (*left, self.run([row], last - first, self.block_tokens), *right)

    def runs_at(self, ranges: list[tuple[int, int]]) -> list[list[Run]]:
        """Return the runs of each range of queries; a row holds several blocks if the partition is invariant."""
        most = MAX_EDGE_TOKENS // self.block_tokens if self.is_invariant else 1
        tokens = self.block_tokens * max(1, min(EDGE_BLOCKS, most))
        rows = [self.streams(self.rows(start, stop, tokens)) for start, stop in ranges]
        if self.is_invariant:
            self.masks.prepare((row for streams in rows for stream in streams for row in stream), self.block_tokens)
        self.masks.expect(row for streams in rows for stream in streams for row in stream)
        return [[run for stream in streams for run in self.runs_of(stream)] for streams in rows]

    def streams(self, rows: Iterable[QueryBlock]) -> list[list[QueryBlock]]:
        """Return the rows as one list; if rows are split, their second and later parts go into further lists."""
        streams: list[list[QueryBlock]] = [[]]
        for row in rows:
            parts = self.parts_of(row)
            streams += [[] for _ in range(len(parts) - len(streams))]
            for stream, part in zip(streams, parts, strict=False):
                stream.append(part)
        return streams

    def parts_of(self, row: QueryBlock) -> list[QueryBlock]:
        """Return the row, or, if it is large, several rows with the same pairs that have small masks or none."""
        if row.is_full or row.num_pairs <= MAX_WHOLE_PAIRS or self.order.local is None:
            return [row]
        bounds = self.bounds(row.first, row.tokens)
        full = intersect(self.full_intervals(bounds), row.intervals)
        rest = intersect(row.intervals, complement(full, self.num_keys))
        if self.is_invariant:
            intervals = union_of_parts(full, rest) if self.has_hole(row) else row.intervals
            return [
                QueryBlock(row.first, row.tokens, (interval,), self.is_full(bounds, (interval,)))
                for interval in intervals
            ]
        if 2 * size(full) < size(row.intervals):
            return [row]
        long = tuple(interval for interval in full if interval[1] - interval[0] >= LONG_INTERVAL)
        long = long if len(long) <= MAX_LONG_INTERVALS else ()
        short = tuple(interval for interval in full if interval not in long)
        read = [((interval,), True) for interval in long] + [(short, True), (rest, False)]
        return [QueryBlock(row.first, row.tokens, intervals, is_full) for intervals, is_full in read if intervals]

    def has_hole(self, row: QueryBlock) -> bool:
        """Return whether the keys that all queries of a row attend to form several intervals."""
        return not row.is_full and len(self.full_intervals(self.bounds(row.first, row.tokens))) > 1

    def bounds(self, first: int, tokens: int) -> tuple[int, int, int]:
        """Return (first query, last query, number of keys) of a row for the local pattern."""
        return first + self.local_offset, first + tokens - 1 + self.local_offset, self.num_keys

    def row(self, first: int, tokens: int) -> QueryBlock:
        """Return the row of the queries at places `first` … `first + tokens - 1`, by looking at the pattern."""
        if self.order.local is None:
            return QueryBlock(first, tokens, ((0, self.num_keys),))
        bounds = self.bounds(first, tokens)
        read = checked_intervals(self.order.local.kind, self.order.local.key_intervals(*bounds), self.num_keys)
        intervals = without_small_gaps(read)
        return QueryBlock(first, tokens, intervals, self.is_full(bounds, intervals))

    def is_full(self, bounds: tuple[int, int, int], intervals: Intervals) -> bool:
        """Return whether the bounds alone prove that every query of a row attends to every key of `intervals`."""
        return intersect(self.full_intervals(bounds), intervals) == intervals

    def full_intervals(self, bounds: tuple[int, int, int]) -> Intervals:
        """Return keys that every query of a row attends to, as far as the bounds alone prove it."""
        return () if self.target_of_places is None else self.target_of_places.full_key_intervals(*bounds)

    @cached_property
    def target_of_places(self) -> Pattern | None:
        """The target as a pattern over places in the token order; None if it has no such form and needs a mask."""
        queries, keys = self.order.queries, self.order.keys
        if self.step < 1 or not isinstance(keys, range) or queries[0] != keys[0] + self.step * self.local_offset:
            return None
        if self.step == 1:
            return self.target if keys[0] == 0 else None
        return self.target.subsample(self.step) if keys[0] < self.step else None

    def rows(self, start: int, stop: int, tokens: int) -> Iterator[QueryBlock]:
        """Yield rows of `tokens` queries from place `start` to `stop`; consecutive rows with equal keys are merged."""
        held: QueryBlock | None = None
        for first in range(start, stop, tokens):
            row = self.row(first, min(tokens, stop - first))
            if held is not None and can_merge(held, row, self.max_merged_pairs):
                held = QueryBlock(held.first, held.tokens + row.tokens, held.intervals, held.is_full and row.is_full)
            else:
                if held is not None and held.intervals:
                    yield held
                held = row
        if held is not None and held.intervals:
            yield held

    @property
    def max_merged_pairs(self) -> int:
        """The maximum number of entries in the mask of merged rows."""
        if self.order.local is None:
            return MAX_MERGED_ORDER_PAIRS
        return MAX_MERGED_INVARIANT_PAIRS if self.is_invariant else MAX_MERGED_PAIRS

    @property
    def is_invariant(self) -> bool:
        """Whether a shift by one block of queries and the same number of keys changes nothing."""
        period = self.target.period
        if period is None or self.order.local is None or self.step == 0:
            return False
        return self.block_tokens * self.step % period == 0

    def inner_row(self) -> Intervals:
        """Return the keys that a block far from both ends attends to, counted from the place of its first query.

        They are found on an axis so long that neither end cuts off any of them. The result is empty if blocks differ.
        """
        if not self.is_invariant or self.order.local is None:
            return ()
        room = self.block_tokens * -(-self.num_keys // self.block_tokens)
        first, last, _ = self.bounds(room, self.block_tokens)
        intervals = without_small_gaps(self.order.local.key_intervals(first, last, 3 * room))
        if intervals and (intervals[0][0] == 0 or intervals[-1][1] == 3 * room):
            # the keys have no bound on this side, so other rows are not shifted copies of this one
            return ()
        return tuple((start - room, stop - room) for start, stop in intervals)

    def inner_blocks(self, inner_row: Intervals) -> tuple[int, int]:
        """Return the range of the blocks for which all keys of `inner_row`, shifted to their places, exist."""
        if not inner_row:
            return 0, 0
        first = max(0, -(inner_row[0][0] // self.block_tokens))
        last = min(self.num_queries, self.num_keys - inner_row[-1][1] + self.block_tokens) // self.block_tokens
        return (first, last) if last - first > 1 else (0, 0)

    def runs_of(self, rows: Iterable[QueryBlock]) -> Iterator[Run]:
        """Yield runs of consecutive rows of the same form, each as long as possible."""
        group: list[QueryBlock] = []
        for row in rows:
            if group and not (can_join(group, row) and self.have_one_mask(group, row)):
                yield self.run(group, len(group), row_step(group))
                group = []
            group.append(row)
        if group:
            yield self.run(group, len(group), row_step(group))

    def have_one_mask(self, group: list[QueryBlock], row: QueryBlock) -> bool:
        """Return whether a row may join a group: not if their masks are different slices of a sheet."""
        step = row.intervals[0][0] - group[-1].intervals[0][0]
        return not self.masks.has_sheet(row) or step == row.tokens

    def run(self, rows: list[QueryBlock], num_blocks: int, step: int) -> Run:
        """Return the run of `rows`, or of `num_blocks` copies of a single row, each `step` keys after the previous."""
        row = rows[0]
        if (
            self.is_invariant
            and len(row.intervals) == 1
            and step == row.tokens
            and len(rows) * row.num_pairs > LARGE_RUN
        ):
            # the rows differ only in their places
            rows = rows[:1]
        gathered, gather_block = None, 1
        if len(row.intervals) > 1:
            gathered, gather_block = self.gather(rows, num_blocks, step)
        mask = self.masks.of(rows)
        return Run(
            first_query=row.first,
            num_blocks=num_blocks,
            block_tokens=row.tokens,
            first_key=row.intervals[0][0],
            key_tokens=size(row.intervals),
            key_step=step,
            bias=mask.bias,
            empty_rows=mask.empty_rows,
            gathered=gathered,
            gather_block=gather_block,
            num_allowed=mask.num_allowed * (num_blocks if len(rows) == 1 else 1),
        )

    def gather(self, rows: list[QueryBlock], num_blocks: int, step: int) -> tuple[Tensor, int]:
        """Return the indices of the gather blocks of each block of a run, and the gather blocks' length in tokens."""
        gather_block = step if len(rows) == 1 and num_blocks > 1 else 0
        for row in rows:
            gather_block = reduce(gcd, (edge for interval in row.intervals for edge in interval), gather_block)
        gather_block = max(divisor for divisor in range(1, MAX_GATHER_BLOCK + 1) if gather_block % divisor == 0)
        gather_block = gather_block if gather_block >= MIN_GATHER_BLOCK else 1
        index = places_of(
            [tuple((start // gather_block, stop // gather_block) for start, stop in row.intervals) for row in rows]
        )
        if len(rows) == 1:
            index = index + torch.arange(num_blocks, device="cpu")[:, None] * (step // gather_block)
        return index, gather_block
