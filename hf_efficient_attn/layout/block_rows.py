"""Rows: blocks of queries and the keys that they attend to; the partitions of a pattern; the masks of runs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from itertools import groupby
from math import prod
from operator import or_
from typing import NoReturn

import torch
from torch import Tensor

from hf_efficient_attn.errors import MaskLimitError, WorkLimitError
from hf_efficient_attn.layout.cache import cached
from hf_efficient_attn.layout.dense_mask import MAX_LOOKED_AT, RowTables, relation
from hf_efficient_attn.layout.dense_mask import MAX_MASK_BYTES as MAX_DENSE_MASK_BYTES
from hf_efficient_attn.patterns.intervals import Intervals, charge, size
from hf_efficient_attn.patterns.pattern import Extent, Pattern, TokenOrder

# if intervals fill at least this share of their hull, computing the gaps is cheaper than gathering
DENSE_HULL = 0.8


@dataclass(frozen=True)
class QueryBlock:
    """A block of queries at places `first` … `first + tokens - 1`, and the places of the keys that it attends to."""

    first: int
    tokens: int
    intervals: Intervals
    is_full: bool = False

    @property
    def num_pairs(self) -> int:
        """The number of pairs of the block, allowed or not."""
        return self.tokens * size(self.intervals)


def without_small_gaps(intervals: Intervals) -> Intervals:
    """Return the hull of the intervals if they fill most of it, otherwise the intervals themselves."""
    if len(intervals) > 1 and size(intervals) >= DENSE_HULL * (intervals[-1][1] - intervals[0][0]):
        return ((intervals[0][0], intervals[-1][1]),)
    return intervals


def can_merge(row: QueryBlock, after: QueryBlock, max_pairs: int) -> bool:
    """Return whether two consecutive rows with the same keys can be one block: full, or small enough together."""
    if row.intervals != after.intervals:
        return False
    return (row.is_full and after.is_full) or (row.tokens + after.tokens) * size(row.intervals) <= max_pairs


def union_of_parts(*parts: Intervals) -> Intervals:
    """Return the intervals of all parts, sorted but not joined."""
    return tuple(sorted(interval for intervals in parts for interval in intervals))


def row_step(group: list[QueryBlock]) -> int:
    """Return the distance between the first keys of consecutive rows of a group."""
    return group[1].intervals[0][0] - group[0].intervals[0][0] if len(group) > 1 else 0


def can_join(group: list[QueryBlock], row: QueryBlock) -> bool:
    """Return whether `row` continues the run of `group`."""
    last = group[-1]
    # there may be a gap between the rows, since queries without keys have no row
    if row.first != last.first + last.tokens:
        return False
    if row.tokens != last.tokens or row.is_full != last.is_full or size(row.intervals) != size(last.intervals):
        return False
    if len(row.intervals) > 1 or len(last.intervals) > 1:
        return len(row.intervals) > 1 and len(last.intervals) > 1
    step = row.intervals[0][0] - last.intervals[0][0]
    return step >= 0 and (len(group) == 1 or step == row_step(group))


# Partitions of a pattern, each of which is easy to compute in its own token order.
#
# Members of a union that keep the order of the tokens form one partition. Each other member (dilation, scattered global
# tokens) has its own partition for each of the orders that it asks for, without the pairs of earlier members.


# in tokens; keys that would need shorter gather blocks are gathered one by one
MIN_GATHER_BLOCK = 8
# a union of more members is one partition, since each member has to leave out the pairs of all earlier ones
MAX_MEMBERS = 32
# a member that asks for at most this many orders always gets them
FEW_ORDERS = 64
# the fixed time of a run is about that of this many scores of dense attention without a mask, on any machine
SCORES_PER_RUN = 80_000
# number of queries in the row from which work is estimated
ROW_TOKENS = 128


@dataclass(frozen=True)
class PatternPartition:
    """Pairs that are computed together.

    Attributes:
        target: which pairs of the order belong to the partition.
        order: the order of the tokens; its local pattern bounds `target`.
    """

    target: Pattern
    order: TokenOrder

    def rows(self, query_offset: int) -> Sequence[int]:
        """Return the queries in their order, counted from the first query of the call."""
        queries = self.order.queries
        if isinstance(queries, range):
            return range(queries.start - query_offset, queries.stop - query_offset, queries.step)
        return tuple(query - query_offset for query in queries)


@cached()
def partitions(pattern: Pattern, extent: Extent) -> tuple[PatternPartition, ...]:
    """Return the partitions of a drawn pattern; every allowed pair belongs to exactly one."""
    found: list[PatternPartition] = []
    seen: Pattern | None = None
    members = pattern.members()
    is_many = len(members) > MAX_MEMBERS
    for member, orders in [(pattern, Pattern.token_orders(pattern, *extent))] if is_many else ordered(members, extent):
        target = member if seen is None else member & ~seen
        seen = member if seen is None else seen | member
        if orders == Pattern.token_orders(member, *extent):
            orders = tuple(replace(order, local=target) for order in orders)
        found += [PatternPartition(target, order) for order in orders]
    return tuple(found)


def ordered(members: tuple[Pattern, ...], extent: Extent) -> list[tuple[Pattern, tuple[TokenOrder, ...]]]:
    """Return (pattern, orders) in the order in which they claim pairs; members in the tokens' own order are joined."""
    listed = [(member, worthwhile(member, member.token_orders(*extent), extent)) for member in members]
    natural = [member for member, orders in listed if orders == Pattern.token_orders(member, *extent)]
    rows = []
    if any(is_gathered(member, extent) for member in natural):
        # keys are gathered anyway, so blocks of global keys are gathered with them; blocks of global queries come first
        blocks = [(member, orders) for member, orders in listed if member.granularity >= MIN_GATHER_BLOCK]
        natural += [member for member, orders in blocks if is_columns(orders, extent)]
        rows = [(member, orders) for member, orders in blocks if is_rows(orders, extent)]
    base = reduce(or_, natural) if natural else None
    rest = [(member, orders) for member, orders in listed if member not in natural and (member, orders) not in rows]
    return rows + ([(base, Pattern.token_orders(base, *extent))] if base else []) + rest


def worthwhile(pattern: Pattern, orders: tuple[TokenOrder, ...], extent: Extent) -> tuple[TokenOrder, ...]:
    """Return the orders, or the tokens' own order if the orders share queries or would take longer."""
    if not have_own_queries(orders):
        return Pattern.token_orders(pattern, *extent)
    if len(orders) <= FEW_ORDERS:
        return orders
    num_queries, num_keys, query_offset = extent
    first = query_offset + num_queries // 2
    row = pattern.key_intervals(first, min(first + ROW_TOKENS, query_offset + num_queries) - 1, num_keys)
    in_order = num_queries * size(row) < len(orders) * SCORES_PER_RUN
    return Pattern.token_orders(pattern, *extent) if in_order else orders


def have_own_queries(orders: tuple[TokenOrder, ...]) -> bool:
    """Return whether no query, and so no pair, belongs to two of the orders."""
    if len(orders) <= 1:
        return True
    listed = [order.queries for order in orders]
    steps = {queries.step if isinstance(queries, range) else None for queries in listed}
    step = steps.pop()
    if step and not steps:
        # each order is one residue class
        return len({queries[0] % step for queries in listed}) == len(listed)
    return len(set().union(*listed)) == sum(map(len, listed))


def is_gathered(pattern: Pattern, extent: Extent) -> bool:
    """Return whether a block in the middle attends to several intervals of keys, in a pattern without a period."""
    num_queries, num_keys, query_offset = extent
    if pattern.period is not None:
        return False
    own = pattern.granularity
    first = (query_offset + num_queries // 2) // own * own
    return len(pattern.key_intervals(first, min(first + own, query_offset + num_queries) - 1, num_keys)) > 1


def is_columns(orders: tuple[TokenOrder, ...], extent: Extent) -> bool:
    """Return whether there is one order, with all queries in their own order, each of which attends to all its keys."""
    queries = range(extent.query_offset, extent.query_offset + extent.num_queries)
    return len(orders) == 1 and orders[0].local is None and orders[0].queries == queries


def is_rows(orders: tuple[TokenOrder, ...], extent: Extent) -> bool:
    """Return whether there is one order, with all keys in their own order, all attended to by each of its queries."""
    return len(orders) == 1 and orders[0].local is None and orders[0].keys == range(extent.num_keys)


def neighbours(heads: Sequence[int]) -> list[tuple[int, int]]:
    """Return (first, count) of each run of consecutive numbers.

    >>> neighbours([0, 1, 2, 5])
    [(0, 3), (5, 1)]
    """
    runs = [list(run) for _, run in groupby(enumerate(heads), lambda pair: pair[1] - pair[0])]
    return [(run[0][1], len(run)) for run in runs]


# The masks of runs: which pairs of each row are allowed, in memory that is linear in the sequence length.
#
# If a partition is invariant along the sequence, the masks of its rows are slices of one sheet: the mask of one row
# over the keys of all rows, each shifted to the place of this row.


# limit for all masks of a layout together
MAX_MASK_BYTES = 4 * 2**30
# number of pairs that are looked at in the time of one step, for a pattern with a single atom
PAIRS_PER_STEP = 256
# only masks with more entries are checked for rows that are all equal
LARGE_MASK = 1 << 16
# a sheet is made only if it replaces masks with more entries than this, all together
MAX_SINGLE_MASKS = 1 << 20
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Mask:
    """The mask of a run.

    Attributes:
        bias, empty_rows: as in `Run`.
        num_allowed: the number of allowed pairs.
    """

    bias: Tensor | None
    empty_rows: Tensor | None
    num_allowed: int


class Budget:
    """Counts the bytes of the masks of one layout, and refuses more than MAX_MASK_BYTES."""

    def __init__(self, what: str, num_dense_bytes: int) -> None:
        self.what, self.num_dense_bytes = what, num_dense_bytes
        self.num_bytes = self.num_pairs = 0

    def expect(self, num_pairs: int, pattern: Pattern) -> None:
        """Charge for looking at `num_pairs` pairs of a pattern, before any mask is made.

        Raises:
            MaskLimitError: these pairs and those of earlier partitions would take too many steps.
        """
        self.num_pairs += num_pairs
        try:
            charge(num_pairs * looks_at_pair(pattern) // PAIRS_PER_STEP)
        except WorkLimitError as error:
            self.refuse(f"would look at about {self.num_pairs:,} pairs one by one", error)

    def refuse(self, why: str, cause: Exception | None = None) -> NoReturn:
        """Raise a MaskLimitError that says why, and what to do."""
        raise MaskLimitError(
            f"{self.what} {why}, because it leaves out single keys nearly everywhere. Use a pattern of whole blocks "
            f"(Blocks), fewer single positions, or shorter inputs{self.way_out()}."
        ) from cause

    def way_out(self) -> str:
        """Return the part of the message that suggests a mask over all pairs; empty if that mask would be too large."""
        if self.num_dense_bytes > MAX_DENSE_MASK_BYTES:
            return ""
        return f"; or backend='sdpa', with a mask over all pairs of {self.num_dense_bytes / 2**30:.1f} GiB"

    def zeros(self, *shape: int) -> Tensor:
        """Return a mask of zeros.

        Raises:
            MaskLimitError: all masks of the layout together would be too large.
        """
        self.num_bytes += 4 * prod(shape)
        if self.num_bytes > MAX_MASK_BYTES:
            self.refuse(f"needs masks of more than {MAX_MASK_BYTES / 2**30:.0f} GiB")
        return torch.zeros(*shape, device=CPU)


class RunMasks:
    """Makes the masks of one partition, on the CPU."""

    def __init__(self, partition: PatternPartition, budget: Budget) -> None:
        self.partition, self.budget = partition, budget
        self.sheets: dict[int, Sheet] = {}

    def prepare(self, rows: Iterable[QueryBlock], block_tokens: int) -> None:
        """Make the sheets of an invariant partition, for each length of rows whose masks are larger than their sheet.

        Args:
            rows: the rows that need masks.
            block_tokens: a period of the partition; rows start at multiples of it.
        """
        of_tokens: dict[int, list[QueryBlock]] = {}
        for row in rows:
            if not row.is_full and len(row.intervals) == 1:
                of_tokens.setdefault(row.tokens, []).append(row)
        for tokens, alike in of_tokens.items():
            first = min(row.intervals[0][0] - row.first for row in alike)
            stop = max(row.intervals[0][1] - row.first for row in alike)
            entries = sum(row.num_pairs for row in alike)
            if entries > max(MAX_SINGLE_MASKS, tokens * (stop - first)):
                # far enough from the start for all of its keys to exist
                place = block_tokens * max(0, -(first // block_tokens))
                allowed = self.allowed([QueryBlock(place, tokens, ((place + first, place + stop),))])
                bias = self.budget.zeros(tokens, stop - first).masked_fill_(~allowed[0], float("-inf"))
                self.sheets[tokens] = Sheet(first, allowed[0], bias)

    def expect(self, rows: Iterable[QueryBlock]) -> None:
        """Refuse rows in which too many pairs would have to be looked at.

        Raises:
            MaskLimitError: there are too many; the message says how many.
        """
        looked_at = sum(row.num_pairs for row in rows if not (row.is_full or self.has_sheet(row)))
        self.budget.expect(looked_at, self.partition.target)

    def of(self, rows: list[QueryBlock]) -> Mask:
        """Return the mask of a run; all its rows have the same shape."""
        if all(row.is_full for row in rows):
            return Mask(None, None, sum(row.num_pairs for row in rows))
        sheet = self.sheets.get(rows[0].tokens)
        if sheet is not None and len(rows) == 1 and self.has_sheet(rows[0]):
            return sheet.part(rows[0])
        return self.single(rows)

    def has_sheet(self, row: QueryBlock) -> bool:
        """Return whether the mask of a row is a slice of a sheet."""
        sheet = self.sheets.get(row.tokens)
        return sheet is not None and not row.is_full and len(row.intervals) == 1 and sheet.covers(row)

    def single(self, rows: list[QueryBlock]) -> Mask:
        """Return a mask made for these rows alone.

        If all queries of each block attend to the same keys, one row of the mask is expanded to all of them. If all
        blocks are equal, they share one mask.
        """
        allowed = self.allowed(rows)
        # `sum` would first make an integer copy
        num_allowed = int(allowed.count_nonzero())
        if num_allowed == allowed.numel():
            return Mask(None, None, num_allowed)
        shape = tuple(allowed.shape)
        if allowed.numel() > LARGE_MASK and torch.equal(allowed, allowed[:, :1].expand(shape)):
            allowed = allowed[:, :1]
        if len(allowed) > 1 and torch.equal(allowed, allowed[:1].expand_as(allowed)):
            allowed, shape = allowed[:1], (1, *shape[1:])
        bias = self.budget.zeros(*allowed.shape).masked_fill_(~allowed, float("-inf"))
        empty_rows = ~allowed.any(-1).expand(shape[:2])
        has_empty = bool(empty_rows.any())
        return Mask(bias.expand(shape), empty_rows if has_empty else None, num_allowed)

    def allowed(self, rows: list[QueryBlock]) -> Tensor:
        """Return which pairs are allowed, bool [rows, queries, keys]; all rows have the same shape."""
        found = torch.empty(len(rows), rows[0].tokens, size(rows[0].intervals), dtype=torch.bool, device=CPU)
        num_rows = max(1, MAX_LOOKED_AT // rows[0].num_pairs)
        for first in range(0, len(rows), num_rows):
            some = rows[first : first + num_rows]
            places = places_of([((row.first, row.first + row.tokens),) for row in some])
            queries = positions_at(self.queries, places)[:, :, None]
            keys = positions_at(self.keys, places_of([row.intervals for row in some]))[:, None]
            num_keys = (
                max(1, MAX_LOOKED_AT // (len(some) * rows[0].tokens)) if self.partition.order.local else keys.shape[2]
            )
            for start in range(0, keys.shape[2], num_keys):
                part = found[first : first + num_rows, :, start : start + num_keys]
                part.copy_(relation(self.target, queries, keys[:, :, start : start + num_keys], self.tables, places))
        return found

    @cached_property
    def target(self) -> Pattern:
        """The target of the partition, with its lookup tables converted to tensors once."""
        return self.partition.target.with_tables(lambda table: torch.tensor(table, device=CPU))

    @cached_property
    def tables(self) -> RowTables:
        """The row intervals of all queries, computed once."""
        order = torch.arange(len(self.partition.order.queries))
        return RowTables(positions_at(self.queries, order)[None, :, None])

    @cached_property
    def queries(self) -> range | Tensor:
        """Positions of the queries, by place."""
        return as_order(self.partition.order.queries)

    @cached_property
    def keys(self) -> range | Tensor:
        """Positions of the keys, by place."""
        return as_order(self.partition.order.keys)


def looks_at_pair(pattern: Pattern) -> int:
    """Return how many steps decide whether a pattern allows a pair: one per atom, and more to search lookup tables."""
    return sum(1 + max(atom.table_sizes, default=0).bit_length() for atom in pattern.atoms())


class Sheet:
    """A mask whose column slices are the masks of all rows of one length.

    Args:
        first: the place of the first column, counted from the place of a row's first query.
        allowed, bias: [tokens, columns].
    """

    def __init__(self, first: int, allowed: Tensor, bias: Tensor) -> None:
        self.first, self.bias = first, bias
        self.counts = torch.nn.functional.pad(allowed.cumsum(1, dtype=torch.int32), (1, 0))

    def columns(self, row: QueryBlock) -> tuple[int, int]:
        """Return the range of columns of a row's keys."""
        ((start, stop),) = row.intervals
        return start - row.first - self.first, stop - row.first - self.first

    def covers(self, row: QueryBlock) -> bool:
        """Return whether all keys of a row have columns."""
        start, stop = self.columns(row)
        return start >= 0 and stop <= self.bias.shape[1]

    def part(self, row: QueryBlock) -> Mask:
        """Return the mask of a row as a view."""
        start, stop = self.columns(row)
        counts = self.counts[:, stop] - self.counts[:, start]
        num_allowed = int(counts.sum())
        if num_allowed == row.num_pairs:
            return Mask(None, None, num_allowed)
        empty_rows = (counts == 0)[None]
        has_empty = bool(empty_rows.any())
        return Mask(self.bias[None, :, start:stop], empty_rows if has_empty else None, num_allowed)


def as_order(positions: Sequence[int]) -> range | Tensor:
    """Return positions as a range or a tensor, for `positions_at`."""
    return positions if isinstance(positions, range) else torch.tensor(positions, dtype=torch.int64, device=CPU)


def places_of(rows: Sequence[Intervals]) -> Tensor:
    """Return the places in the intervals of each row, int64 [rows, places]; all rows have the same number of places."""
    starts, stops = torch.tensor([interval for intervals in rows for interval in intervals], device=CPU).unbind(1)
    counts = stops - starts
    last = counts.cumsum(0)
    return (torch.arange(int(last[-1]), device=CPU) + (stops - last).repeat_interleave(counts)).view(len(rows), -1)


def positions_at(order: range | Tensor, places: Tensor) -> Tensor:
    """Return the positions at `places` of an order, in the shape of `places`."""
    return places * order.step + order.start if isinstance(order, range) else order[places]
