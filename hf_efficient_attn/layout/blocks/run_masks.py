"""The masks of runs: which pairs of a row of blocks are allowed, in memory that grows as the length, not as its square.

Where moving on along the sequence changes nothing, the masks of all rows are windows of one sheet: the row at the
first place, over all keys that any row can see from its own.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NoReturn

import torch
from torch import Tensor

from hf_efficient_attn.errors import MaskLimitError
from hf_efficient_attn.layout.blocks.rows import Row
from hf_efficient_attn.layout.blocks.shares import PatternShare
from hf_efficient_attn.layout.dense.pairs import MAX_LOOKED_AT
from hf_efficient_attn.layout.dense.pairs import MAX_MASK_BYTES as MAX_DENSE_MASK_BYTES
from hf_efficient_attn.patterns.intervals import Intervals, size
from hf_efficient_attn.patterns.pattern import Pattern

# all masks of a layout together, in bytes
MAX_MASK_BYTES = 4 * 2**30
# pairs that one layout looks at in rows that may read most keys; their masks grow as the square of the length, and
# larger ones would not be kept between calls
MAX_DENSE_PAIRS = 1 << 26
# ... of a pattern of up to so many atoms; every further one takes as long again for each pair
FEW_ATOMS = 4
# rows that may read so much of all pairs are dense
DENSE_SHARE = 0.25
# a mask of more entries may be one of a sheet, or one row that stands for all
LARGE_MASK = 1 << 16
# together, the masks of rows that could be windows of a sheet
MAX_SINGLE_MASKS = 1 << 20
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Mask:
    """The mask of a run.

    Attributes:
        bias, empty_rows: as those of a `Run`.
        num_allowed: allowed pairs in it.
    """

    bias: Tensor | None
    empty_rows: Tensor | None
    num_allowed: int


class Budget:
    """Counts the bytes of the masks of one layout, and refuses more than MAX_MASK_BYTES."""

    def __init__(self, what: str, num_dense_bytes: int) -> None:
        self.what, self.num_dense_bytes = what, num_dense_bytes
        self.num_bytes = self.num_dense_pairs = 0

    def expect(self, num_pairs: int, total: int, num_atoms: int) -> None:
        """Refuse, before anything is filled in, to look at `num_pairs` of the `total` pairs of a share.

        num_atoms: of the pattern that is asked for every pair.

        Raises:
            MaskLimitError: with those of the shares before they would take time and memory that grow as the square.
        """
        self.num_dense_pairs += num_pairs if num_pairs >= DENSE_SHARE * total else 0
        most = MAX_DENSE_PAIRS * FEW_ATOMS // max(FEW_ATOMS, num_atoms)
        if self.num_dense_pairs > most:
            self.refuse(
                f"would look at about {self.num_dense_pairs:,} pairs one by one, and keep masks of "
                f"{4 * self.num_dense_pairs / 2**30:.1f} GiB; at most {most:,} pairs are looked at"
            )

    def refuse(self, why: str) -> NoReturn:
        """Raise MaskLimitError that says why, and what to do."""
        raise MaskLimitError(
            f"{self.what} {why}, since single keys are left out nearly everywhere. Use a pattern of whole blocks "
            f"(Blocks), fewer single positions, or shorter inputs{self.way_out()}."
        )

    def way_out(self) -> str:
        """Return what a message says of the backend that has a mask over all pairs, where it would do it."""
        if self.num_dense_bytes > MAX_DENSE_MASK_BYTES:
            return ""
        return f"; or backend='sdpa', with a mask over all pairs of {self.num_dense_bytes / 2**30:.1f} GiB"

    def zeros(self, *shape: int) -> Tensor:
        """Return a mask of zeros.

        Raises:
            MaskLimitError: it would be one too many.
        """
        self.num_bytes += 4 * prod(shape)
        if self.num_bytes > MAX_MASK_BYTES:
            self.refuse(f"needs masks of more than {MAX_MASK_BYTES / 2**30:.0f} GiB")
        return torch.zeros(*shape, device=CPU)


class RunMasks:
    """Makes the masks of one share."""

    def __init__(self, share: PatternShare, device: torch.device, budget: Budget) -> None:
        self.share, self.device, self.budget = share, device, budget
        self.sheets: dict[int, Sheet] = {}

    def prepare(self, rows: Iterable[Row], block_tokens: int) -> None:
        """Make the sheets of a share that does not change along the sequence, where they are smaller than the masks.

        Args:
            rows: those with masks of their own.
            block_tokens: the rows start at multiples of it, at which the share repeats itself.
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
                # far enough from the start for all of its keys to have a place
                place = block_tokens * max(0, -(first // block_tokens))
                allowed = self.allowed([Row(place, tokens, ((place + first, place + stop),))])
                bias = self.budget.zeros(tokens, stop - first).masked_fill_(~allowed[0], float("-inf"))
                self.sheets[tokens] = Sheet(first, allowed[0], bias.to(self.device))

    def expect(self, rows: Iterable[Row]) -> None:
        """Refuse rows of which more pairs would have to be looked at than any pattern should.

        Raises:
            MaskLimitError: names how many.
        """
        looked_at = sum(row.num_pairs for row in rows if not (row.is_full or self.has_sheet(row)))
        num_pairs = len(self.share.order.queries) * len(self.share.order.keys)
        self.budget.expect(looked_at, num_pairs, len(self.share.target.atoms()))

    def of(self, rows: list[Row]) -> Mask:
        """Return the mask of a run of rows, all of equal shape."""
        if all(row.is_full for row in rows):
            return Mask(None, None, sum(row.num_pairs for row in rows))
        sheet = self.sheets.get(rows[0].tokens)
        if sheet is not None and len(rows) == 1 and self.has_sheet(rows[0]):
            return sheet.window(rows[0])
        return self.single(rows)

    def has_sheet(self, row: Row) -> bool:
        """Return whether the mask of a row is a window of a sheet."""
        sheet = self.sheets.get(row.tokens)
        return sheet is not None and not row.is_full and len(row.intervals) == 1 and sheet.covers(row)

    def single(self, rows: list[Row]) -> Mask:
        """Return a mask of its own; one row stands for all where the queries of a block may read the same keys."""
        allowed = self.allowed(rows)
        # a sum would copy them as integers first
        num_allowed = int(allowed.count_nonzero())
        if num_allowed == allowed.numel():
            return Mask(None, None, num_allowed)
        shape = allowed.shape
        if allowed.numel() > LARGE_MASK and torch.equal(allowed, allowed[:, :1].expand(shape)):
            allowed = allowed[:, :1]
        bias = self.budget.zeros(*allowed.shape).masked_fill_(~allowed, float("-inf"))
        empty_rows = ~allowed.any(-1).expand(shape[:2])
        has_empty = bool(empty_rows.any())
        return Mask(bias.to(self.device).expand(shape), empty_rows.to(self.device) if has_empty else None, num_allowed)

    def allowed(self, rows: list[Row]) -> Tensor:
        """Return which pairs are allowed, bool [rows, queries, keys]; all rows are of one shape."""
        found = torch.empty(len(rows), rows[0].tokens, size(rows[0].intervals), dtype=torch.bool, device=CPU)
        num_rows = max(1, MAX_LOOKED_AT // rows[0].num_pairs)
        for first in range(0, len(rows), num_rows):
            some = rows[first : first + num_rows]
            queries = places_at(self.queries, [((row.first, row.first + row.tokens),) for row in some])[:, :, None]
            keys = places_at(self.keys, [row.intervals for row in some])[:, None]
            num_keys = (
                max(1, MAX_LOOKED_AT // (len(some) * rows[0].tokens)) if self.share.order.local else keys.shape[2]
            )
            for start in range(0, keys.shape[2], num_keys):
                part = found[first : first + num_rows, :, start : start + num_keys]
                part.copy_(self.target.allowed(queries, keys[:, :, start : start + num_keys]))
        return found

    @cached_property
    def target(self) -> Pattern:
        """The pairs that are meant, with lookup tables as tensors: once, not for every row."""
        return self.share.target.with_tables(lambda table: torch.tensor(table, device=CPU))

    @cached_property
    def queries(self) -> range | Tensor:
        """Positions of the queries, by place."""
        return as_order(self.share.order.queries)

    @cached_property
    def keys(self) -> range | Tensor:
        """Positions of the keys, by place."""
        return as_order(self.share.order.keys)


class Sheet:
    """The masks of all rows of one length, which differ only in how far they reach.

    Attributes:
        first: the place of the first column, counted from that of a row's first query.
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

    def window(self, row: Row) -> Mask:
        """Return the mask of a row, a view."""
        start, stop = self.columns(row)
        counts = self.counts[:, stop] - self.counts[:, start]
        num_allowed = int(counts.sum())
        if num_allowed == row.num_pairs:
            return Mask(None, None, num_allowed)
        empty_rows = (counts == 0)[None]
        has_empty = bool(empty_rows.any())
        bias = self.bias[None, :, start:stop]
        return Mask(bias, empty_rows.to(bias.device) if has_empty else None, num_allowed)


def as_order(positions: Sequence[int]) -> range | Tensor:
    """Return positions in a form that `places_at` reads fast."""
    return positions if isinstance(positions, range) else torch.tensor(positions, device=CPU)


def places_at(order: range | Tensor, places: Sequence[Intervals]) -> Tensor:
    """Return the positions at the given places of an order, [rows, places]; every row has equally many places."""
    index = torch.stack(
        [torch.cat([torch.arange(*interval, device=CPU) for interval in intervals]) for intervals in places]
    )
    return index * order.step + order.start if isinstance(order, range) else order[index]
