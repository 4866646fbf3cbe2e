"""Which runs are the first of all their queries: their results are written, those of further runs joined to them."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from hf_efficient_attn.layout.blocks.layout import Blank, BlockLayout, CompiledShare, Run

# more ranges of queries that nothing is written to are filled with all between them, in one go
MAX_RANGES = 16
NOTHING, WRITTEN, JOINED = b"\x00", b"\x01", b"\x02"
UNWRITTEN = re.compile(rb"[^\x01]+")


def with_first_runs(shares: list[tuple[Sequence[int], CompiledShare]], num_heads: int, num_queries: int) -> BlockLayout:
    """Return the layout of some shares, whose runs say whether they are the first of their queries.

    Args:
        shares: each with its queries in their order.
    """
    edges = {edge for _, share in shares for edge in (share.first_head, share.first_head + share.num_heads)}
    written = FirstRuns({0, num_heads} | edges, num_queries)
    found = []
    for rows, share in shares:
        runs = tuple(replace(run, is_first=written.is_first(share, rows, run)) for run in share.runs)
        found.append(replace(share, runs=runs))
    return BlockLayout(tuple(found), tuple(written.blanks()))


class FirstRuns:
    """What runs have written so far, as they are met in the order in which they are computed.

    Args:
        edges: the heads at which shares begin and end: heads between two of them are alike.
    """

    def __init__(self, edges: set[int], num_queries: int) -> None:
        self.edges = sorted(edges)
        self.states = {first: bytearray(num_queries) for first in self.edges[:-1]}

    def is_first(self, share: CompiledShare, rows: Sequence[int], run: Run) -> bool:
        """Return whether no run was met yet that has queries of this one, and count it."""
        own = rows[run.first_query : run.first_query + run.num_blocks * run.block_tokens]
        states = [
            state
            for first, state in self.states.items()
            if share.first_head <= first < share.first_head + share.num_heads
        ]
        found = [read(state, own) for state in states]
        is_first = not any(each.strip(NOTHING) for each in found)
        for state, each in zip(states, found, strict=True):
            write(state, own, WRITTEN * len(own) if is_first else each.replace(NOTHING, JOINED))
        return is_first

    def blanks(self) -> Iterator[Blank]:
        """Yield what has to be filled before the first run."""
        for first, stop in zip(self.edges, self.edges[1:], strict=False):
            ranges = [found.span() for found in UNWRITTEN.finditer(self.states[first])]
            if len(ranges) > MAX_RANGES:
                ranges = [(ranges[0][0], ranges[-1][1])]
            for start, end in ranges:
                yield Blank(first, stop - first, start, end - start)


def read(state: bytearray, rows: Sequence[int]) -> bytes:
    """Return the bytes of some queries."""
    if isinstance(rows, range):
        return bytes(state[slice_of(rows)])
    return bytes(map(state.__getitem__, rows))


def write(state: bytearray, rows: Sequence[int], new: bytes) -> None:
    """Replace the bytes of some queries."""
    if isinstance(rows, range):
        state[slice_of(rows)] = new
        return
    for row, each in zip(rows, new, strict=True):
        state[row] = each


def slice_of(rows: range) -> slice:
    """Return a range, which counts upwards from 0 or more, as a slice."""
    return slice(rows.start, rows.stop, rows.step)
