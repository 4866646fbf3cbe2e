"""BlockLayout: which keys each block of queries attends to, compressed into runs of similar blocks."""

import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.layout.cache import size_in_bytes
from hf_efficient_attn.layout.transfer import send


@dataclass(frozen=True, eq=False)
class Run:
    """Consecutive query blocks of equal length, each of which attends to the same number of keys.

    Block b holds the `block_tokens` queries that start at place `first_query + b * block_tokens`. Its keys are the
    `key_tokens` keys that start at place `first_key + b * key_step`, or, if `gathered` is given, the keys of the listed
    gather blocks, each of which holds `gather_block` consecutive keys.

    Attributes:
        bias: [num_blocks or 1, block_tokens, key_tokens] of 0 and -inf; None if every query attends to every key.
        empty_rows: bool [num_blocks or 1, block_tokens], True for queries without any key; None if there are none.
        gathered: int64 [num_blocks, key_tokens // gather_block], indices of gather blocks; None if the keys of each
            block are contiguous.
        num_allowed: the number of allowed pairs in all blocks; a chunk cut from a run keeps the number of the run.
        is_first: whether no earlier run has any of these queries, in any head.
    """

    first_query: int
    num_blocks: int
    block_tokens: int
    first_key: int
    key_tokens: int
    key_step: int = 0
    bias: Tensor | None = None
    empty_rows: Tensor | None = None
    gathered: Tensor | None = None
    gather_block: int = 1
    num_allowed: int = 0
    is_first: bool = False

    @property
    def num_pairs(self) -> int:
        """The number of scores that the run computes, allowed or not."""
        return self.num_blocks * self.block_tokens * self.key_tokens

    @property
    def num_keys(self) -> int:
        """The number of keys that the run reads, counted once per block of queries."""
        return self.num_blocks * self.key_tokens

    def cut(self, max_queries: int) -> Iterator["Run"]:
        """Yield chunks of about `max_queries` queries; a block is cut only if it is the only block of the run."""
        if self.num_blocks == 1:
            yield from self._cut_block(max_queries)
            return
        max_blocks = max(1, max_queries // self.block_tokens)
        for first in range(0, self.num_blocks, max_blocks):
            blocks = slice(first, min(first + max_blocks, self.num_blocks))
            yield replace(
                self,
                first_query=self.first_query + first * self.block_tokens,
                num_blocks=blocks.stop - first,
                first_key=self.first_key + first * self.key_step,
                bias=_of_blocks(self.bias, blocks),
                empty_rows=_of_blocks(self.empty_rows, blocks),
                gathered=None if self.gathered is None else self.gathered[blocks],
            )

    def _cut_block(self, max_queries: int) -> Iterator["Run"]:
        for first in range(0, self.block_tokens, max_queries):
            rows = slice(first, min(first + max_queries, self.block_tokens))
            yield replace(
                self,
                first_query=self.first_query + first,
                block_tokens=rows.stop - first,
                bias=None if self.bias is None else self.bias[:, rows],
                empty_rows=None if self.empty_rows is None else self.empty_rows[:, rows],
            )


def _of_blocks(tensor: Tensor | None, blocks: slice) -> Tensor | None:
    return tensor if tensor is None or tensor.shape[0] == 1 else tensor[blocks]


@dataclass(frozen=True, eq=False)
class CompiledPartition:
    """Runs of some heads over one order of the tokens.

    Attributes:
        first_head, num_heads: the query heads that these runs are for.
        queries: indices of the queries in this order, counted from the first query of the call.
        keys: positions of the keys in this order. Each of both is a range or an int64 tensor on the device of the call.
    """

    first_head: int
    num_heads: int
    queries: range | Tensor
    keys: range | Tensor
    runs: tuple[Run, ...]

    @cached_property
    def _chunks(self) -> dict[Hashable, tuple[tuple[Run, Run], ...]]:
        return {}

    def chunks(self, key: Hashable, max_queries: Callable[[Run], int]) -> tuple[tuple[Run, Run], ...]:
        """Return (run, chunk) for each chunk of about `max_queries(run)` queries; the result is cached under `key`."""
        found = self._chunks.get(key)
        if found is None:
            found = tuple((run, chunk) for run in self.runs for chunk in run.cut(max(1, max_queries(run))))
            found = self._chunks.setdefault(key, found)
        return found


@dataclass(frozen=True)
class Blank:
    """Queries of consecutive heads that no run writes first: runs only join results to them, or none has them."""

    first_head: int
    num_heads: int
    first_query: int
    num_queries: int


@dataclass(frozen=True, eq=False)
class BlockLayout:
    """A compiled layout, in which every allowed pair of every head is unmasked in exactly one run.

    Attributes:
        blanks: the queries to fill before any run is computed; all other queries are written by their first run.
    """

    partitions: tuple[CompiledPartition, ...]
    blanks: tuple[Blank, ...] = ()

    def on(self, device: torch.device) -> "BlockLayout":
        """Return this layout, whose tensors are on the CPU, with its tensors on `device`."""
        if device.type == "cpu":
            return self
        holders = [*self.partitions, *(run for _, run in self.runs())]
        tensors = {id(each): each for holder in holders for each in vars(holder).values() if isinstance(each, Tensor)}
        sent = dict(zip(tensors, send(list(tensors.values()), device), strict=True))

        def moved(holder: Any, **changes: Any) -> Any:
            own = {name: sent[id(each)] for name, each in vars(holder).items() if isinstance(each, Tensor)}
            return replace(holder, **own, **changes)

        partitions = (moved(partition, runs=tuple(map(moved, partition.runs))) for partition in self.partitions)
        return replace(self, partitions=tuple(partitions))

    def runs(self) -> Iterator[tuple[CompiledPartition, Run]]:
        """Yield every run with its partition."""
        return ((partition, run) for partition in self.partitions for run in partition.runs)

    @cached_property
    def num_pairs(self) -> int:
        """The number of scores that are computed in all heads, allowed or not."""
        return sum(partition.num_heads * run.num_pairs for partition, run in self.runs())

    @cached_property
    def num_allowed(self) -> int:
        """The number of allowed pairs in all heads."""
        return sum(partition.num_heads * run.num_allowed for partition, run in self.runs())

    @cached_property
    def num_mask_bytes(self) -> int:
        """The memory of all masks in bytes; views of one tensor count once."""
        return size_in_bytes([run.bias for _, run in self.runs()])

    @cached_property
    def num_gathered(self) -> int:
        """The number of keys that are gathered in all heads, counted once per block of queries."""
        return sum(partition.num_heads * run.num_keys for partition, run in self.runs() if run.gathered is not None)

    @cached_property
    def num_moved(self) -> int:
        """The number of queries in all heads that are copied because their order is not a range."""
        return sum(
            partition.num_heads * len(partition.queries)
            for partition in self.partitions
            if not isinstance(partition.queries, range)
        )

    @cached_property
    def num_runs(self) -> int:
        """The number of runs, each of which costs a fixed time."""
        return sum(len(partition.runs) for partition in self.partitions)


# Lengths of query blocks: long blocks take less time per score, short ones compute fewer scores that are not allowed.


@dataclass(frozen=True)
class BlockCosts:
    """The time per score in query blocks of each length, relative to dense attention without a mask.

    Attributes:
        per_score: (queries per block, time per score), in ascending order of length.
    """

    per_score: tuple[tuple[int, float], ...]

    @classmethod
    def only(cls, block_tokens: int, per_score: float = 1.0) -> "BlockCosts":
        """Return the costs of a kernel that is used with blocks of one length."""
        return cls(((block_tokens, per_score),))

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths of blocks to choose from."""
        return tuple(tokens for tokens, _ in self.per_score)

    def of_score(self, block_tokens: int) -> float:
        """Return the time per score for any block length, from the longest listed length that does not exceed it.

        >>> BlockCosts(((32, 1.2), (192, 1.0))).of_score(100)
        1.2
        """
        shorter = [time for tokens, time in self.per_score if tokens <= block_tokens]
        return shorter[-1] if shorter else self.per_score[0][1]

    def cheapest(self, lengths: set[int], num_keys: Callable[[int], int]) -> int:
        """Return the block length with the least time per query, the shortest of them if several take equally long.

        Args:
            num_keys: returns how many keys a block of a given length attends to.

        >>> BlockCosts(((32, 1.2), (192, 1.0))).cheapest({32, 192}, lambda tokens: 512 + tokens)
        32
        """
        if len(lengths) == 1:
            return min(lengths)
        return min(sorted(lengths), key=lambda tokens: self.of_score(tokens) * num_keys(tokens))


# First runs: the first run of its queries writes its results, and later runs join theirs to them.


# if a head has more unwritten ranges of queries than this, a single range from the first to the last is filled
MAX_RANGES = 16
NOTHING, WRITTEN, JOINED = b"\x00", b"\x01", b"\x02"
UNWRITTEN = re.compile(rb"[^\x01]+")


def with_first_runs(
    partitions: list[tuple[Sequence[int], CompiledPartition]], num_heads: int, num_queries: int
) -> BlockLayout:
    """Return the layout of the partitions, with `is_first` set for each run.

    Args:
        partitions: (queries, partition), with the queries in the order of the partition.
    """
    edges = {
        edge
        for _, partition in partitions
        for edge in (partition.first_head, partition.first_head + partition.num_heads)
    }
    written = FirstRuns({0, num_heads} | edges, num_queries)
    found = []
    for rows, partition in partitions:
        runs = tuple(replace(run, is_first=written.is_first(partition, rows, run)) for run in partition.runs)
        found.append(replace(partition, runs=runs))
    return BlockLayout(tuple(found), tuple(written.blanks()))


class FirstRuns:
    """Tracks which queries have been written while the runs are visited in the order in which they are computed.

    Args:
        edges: the heads at which partitions begin and end; heads between two edges belong to the same partitions.
    """

    def __init__(self, edges: set[int], num_queries: int) -> None:
        self.edges = sorted(edges)
        self.states = {first: bytearray(num_queries) for first in self.edges[:-1]}

    def is_first(self, partition: CompiledPartition, rows: Sequence[int], run: Run) -> bool:
        """Return whether no earlier run has any of this run's queries, and record this run."""
        own = rows[run.first_query : run.first_query + run.num_blocks * run.block_tokens]
        states = [
            state
            for first, state in self.states.items()
            if partition.first_head <= first < partition.first_head + partition.num_heads
        ]
        found = [read(state, own) for state in states]
        is_first = not any(each.strip(NOTHING) for each in found)
        for state, each in zip(states, found, strict=True):
            write(state, own, WRITTEN * len(own) if is_first else each.replace(NOTHING, JOINED))
        return is_first

    def blanks(self) -> Iterator[Blank]:
        """Yield the queries that have to be filled before the first run."""
        for first, stop in zip(self.edges, self.edges[1:], strict=False):
            ranges = [found.span() for found in UNWRITTEN.finditer(self.states[first])]
            if len(ranges) > MAX_RANGES:
                ranges = [(ranges[0][0], ranges[-1][1])]
            for start, end in ranges:
                yield Blank(first, stop - first, start, end - start)


def read(state: bytearray, rows: Sequence[int]) -> bytes:
    """Return the states of some queries, one byte each."""
    if isinstance(rows, range):
        return bytes(state[slice_of(rows)])
    return bytes(map(state.__getitem__, rows))


def write(state: bytearray, rows: Sequence[int], new: bytes) -> None:
    """Replace the states of some queries."""
    if isinstance(rows, range):
        state[slice_of(rows)] = new
        return
    for row, each in zip(rows, new, strict=True):
        state[row] = each


def slice_of(rows: range) -> slice:
    """Return an ascending range that starts at 0 or more as a slice."""
    return slice(rows.start, rows.stop, rows.step)
