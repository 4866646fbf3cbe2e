"""The masks of runs: which pairs of a row of blocks are allowed, in memory that is linear in the length.

If a share is invariant along the sequence, the masks of all rows are parts of one sheet: the mask of one row over all
keys that any row can reach from its place.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NoReturn

import torch
from torch import Tensor

from hf_efficient_attn.errors import MaskLimitError, WorkLimitError
from hf_efficient_attn.layout.blocks.rows import Row
from hf_efficient_attn.layout.blocks.shares import PatternShare
from hf_efficient_attn.layout.dense.pairs import MAX_LOOKED_AT
from hf_efficient_attn.layout.dense.pairs import MAX_MASK_BYTES as MAX_DENSE_MASK_BYTES
from hf_efficient_attn.layout.relation import RowTables, relation
from hf_efficient_attn.patterns.intervals import Intervals, size
from hf_efficient_attn.patterns.pattern import Pattern
from hf_efficient_attn.patterns.work import spend

# of all masks of a layout together
MAX_MASK_BYTES = 4 * 2**30
# pairs that are looked at in the time of one step, for a pattern of one atom
PAIRS_PER_STEP = 256
# only masks with more entries are checked for rows that are all equal
LARGE_MASK = 1 << 16
# entries of the masks of rows that could be parts of a sheet, all together
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
        """Refuse to look at so many pairs of a pattern, before any mask is made.

        Raises:
            MaskLimitError: together with earlier shares they would take too many steps.
        """
        self.num_pairs += num_pairs
        try:
            spend(num_pairs * looks_at_pair(pattern) // PAIRS_PER_STEP)
        except WorkLimitError as error:
            self.refuse(f"would look at about {self.num_pairs:,} pairs one by one", error)

    def refuse(self, why: str, cause: Exception | None = None) -> NoReturn:
        """Raise a MaskLimitError that says why, and what to do."""
        raise MaskLimitError(
            f"{self.what} {why}, since single keys are left out nearly everywhere. Use a pattern of whole blocks "
            f"(Blocks), fewer single positions, or shorter inputs{self.way_out()}."
        ) from cause

    def way_out(self) -> str:
        """Return the part of a message about the backend with a mask over all pairs, if that could compute the call."""
        if self.num_dense_bytes > MAX_DENSE_MASK_BYTES:
            return ""
        return f"; or backend='sdpa', with a mask over all pairs of {self.num_dense_bytes / 2**30:.1f} GiB"

    def zeros(self, *shape: int) -> Tensor:
        """Return a mask of zeros.

        Raises:
            MaskLimitError: the masks together would be too large.
        """
        self.num_bytes += 4 * prod(shape)
        if self.num_bytes > MAX_MASK_BYTES:
            self.refuse(f"needs masks of more than {MAX_MASK_BYTES / 2**30:.0f} GiB")
        return torch.zeros(*shape, device=CPU)


class RunMasks:
    """Makes the masks of one share, on the CPU."""

    def __init__(self, share: PatternShare, budget: Budget) -> None:
        self.share, self.budget = share, budget
        self.sheets: dict[int, Sheet] = {}

    def prepare(self, rows: Iterable[Row], block_tokens: int) -> None:
        """Make the sheets of an invariant share, where they are smaller than the masks of all rows.

        Args:
            rows: the rows that need masks.
            block_tokens: the share repeats itself, and rows start, at multiples of it.
        """
        of_tokens: dict[int, list[Row]] = {}
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
                allowed = self.allowed([Row(place, tokens, ((place + first, place + stop),))])
                bias = self.budget.zeros(tokens, stop - first).masked_fill_(~allowed[0], float("-inf"))
                self.sheets[tokens] = Sheet(first, allowed[0], bias)

    def expect(self, rows: Iterable[Row]) -> None:
        """Refuse rows in which too many pairs would have to be looked at.

        Raises:
            MaskLimitError: names how many.
        """
        looked_at = sum(row.num_pairs for row in rows if not (row.is_full or self.has_sheet(row)))
        self.budget.expect(looked_at, self.share.target)

    def of(self, rows: list[Row]) -> Mask:
        """Return the mask of a run of rows, which are of equal shape."""
        if all(row.is_full for row in rows):
            return Mask(None, None, sum(row.num_pairs for row in rows))
        sheet = self.sheets.get(rows[0].tokens)
        if sheet is not None and len(rows) == 1 and self.has_sheet(rows[0]):
            return sheet.part(rows[0])
        return self.single(rows)

    def has_sheet(self, row: Row) -> bool:
        """Return whether the mask of a row is a part of a sheet."""
        sheet = self.sheets.get(row.tokens)
        return sheet is not None and not row.is_full and len(row.intervals) == 1 and sheet.covers(row)

    def single(self, rows: list[Row]) -> Mask:
        """Return a mask of its own; if all queries of a block read the same keys, one row is expanded to all.

        Blocks that are all alike share the mask of one.
        """
        allowed = self.allowed(rows)
        # `sum` would first copy them as integers
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

    def allowed(self, rows: list[Row]) -> Tensor:
        """Return which pairs are allowed, bool [rows, queries, keys]; all rows are of equal shape."""
        found = torch.empty(len(rows), rows[0].tokens, size(rows[0].intervals), dtype=torch.bool, device=CPU)
        num_rows = max(1, MAX_LOOKED_AT // rows[0].num_pairs)
        for first in range(0, len(rows), num_rows):
            some = rows[first : first + num_rows]
            places = places_of([((row.first, row.first + row.tokens),) for row in some])
            queries = positions_at(self.queries, places)[:, :, None]
            keys = positions_at(self.keys, places_of([row.intervals for row in some]))[:, None]
            num_keys = (
                max(1, MAX_LOOKED_AT // (len(some) * rows[0].tokens)) if self.share.order.local else keys.shape[2]
            )
            for start in range(0, keys.shape[2], num_keys):
                part = found[first : first + num_rows, :, start : start + num_keys]
                part.copy_(relation(self.target, queries, keys[:, :, start : start + num_keys], self.tables, places))
        return found

    @cached_property
    def target(self) -> Pattern:
        """The target of the share, with its lookup tables converted to tensors once."""
        return self.share.target.with_tables(lambda table: torch.tensor(table, device=CPU))

    @cached_property
    def tables(self) -> RowTables:
        """The row intervals of all queries, asked for once."""
        order = torch.arange(len(self.share.order.queries))
        return RowTables(positions_at(self.queries, order)[None, :, None])

    @cached_property
    def queries(self) -> range | Tensor:
        """Positions of the queries, by place."""
        return as_order(self.share.order.queries)

    @cached_property
    def keys(self) -> range | Tensor:
        """Positions of the keys, by place."""
        return as_order(self.share.order.keys)


def looks_at_pair(pattern: Pattern) -> int:
    """Return how many looks at atoms tell whether a pattern allows a pair; in lookup tables it has to be searched."""
    return sum(1 + max(atom.table_sizes, default=0).bit_length() for atom in pattern.atoms())


class Sheet:
    """The masks of all rows of one length, which differ only in which keys they reach.

    Attributes:
        first: the place of the first column, counted from the place of a row's first query.
        allowed, bias: [tokens, columns].
    """

    def __init__(self, first: int, allowed: Tensor, bias: Tensor) -> None:
        self.first, self.bias = first, bias
        self.counts = torch.nn.functional.pad(allowed.cumsum(1, dtype=torch.int32), (1, 0))

    def columns(self, row: Row) -> tuple[int, int]:
        """Return the columns of a row's keys."""
        ((start, stop),) = row.intervals
        return start - row.first - self.first, stop - row.first - self.first

    def covers(self, row: Row) -> bool:
        """Return whether all keys of a row have columns."""
        start, stop = self.columns(row)
        return start >= 0 and stop <= self.bias.shape[1]

    def part(self, row: Row) -> Mask:
        """Return the mask of a row, a view."""
        start, stop = self.columns(row)
        counts = self.counts[:, stop] - self.counts[:, start]
        num_allowed = int(counts.sum())
        if num_allowed == row.num_pairs:
            return Mask(None, None, num_allowed)
        empty_rows = (counts == 0)[None]
        has_empty = bool(empty_rows.any())
        return Mask(self.bias[None, :, start:stop], empty_rows if has_empty else None, num_allowed)


def as_order(positions: Sequence[int]) -> range | Tensor:
    """Return positions in the form that `positions_at` reads fast."""
    return positions if isinstance(positions, range) else torch.tensor(positions, dtype=torch.int64, device=CPU)


def places_of(rows: Sequence[Intervals]) -> Tensor:
    """Return the places that lie in the intervals of each row, int64 [rows, places]; every row has equally many."""
    starts, stops = torch.tensor([interval for intervals in rows for interval in intervals], device=CPU).unbind(1)
    counts = stops - starts
    last = counts.cumsum(0)
    return (torch.arange(int(last[-1]), device=CPU) + (stops - last).repeat_interleave(counts)).view(len(rows), -1)


def positions_at(order: range | Tensor, places: Tensor) -> Tensor:
    """Return the positions at some places of an order, of their shape."""
    return places * order.step + order.start if isinstance(order, range) else order[places]
