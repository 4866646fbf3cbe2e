"""Keys that are read in groups: lists of queries and of the keys that each of them reads."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.errors import InputError
from hf_efficient_attn.layout.chosen.chosen_keys import (
    MEAN,
    PLACES,
    POSITIONS,
    SOFTMAX,
    ChosenKeys,
    States,
    in_range,
)
from hf_efficient_attn.layout.chosen.grouped_tiles import (
    FEW_QUERIES,
    Chunks,
    chunk_tiles,
    group_tiles,
    place_counts,
    read_listed,
    stand_once,
)
from hf_efficient_attn.layout.chosen.groups import GroupedKeys, Groups
from hf_efficient_attn.layout.chosen.holding_groups import holding_groups, of_groups
from hf_efficient_attn.layout.chosen.tiles import Sizes, Tiles, TileWork
from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.messages import shown
from hf_efficient_attn.patterns.checks import is_integer


@dataclass(frozen=True, eq=False)
class KeyGroups(GroupedKeys):
    """Groups of queries and keys: every query of a group reads every key of it that the pattern and the masks allow.

    A query may be in no group (its output is 0), in one, or in several. With `join="mean"` it is the Routing
    Transformer's (arXiv:2003.05997) mean over its groups: the sum of the groups' own softmax outputs, divided by the
    number of groups that hold the query plus `mean_epsilon`.

    Attributes:
        queries, keys: int [B or 1, heads, G, wq] and [B or 1, heads, G, wk], positions on the axis of the queries (in
            cached decoding those of the call are the last) and indices of keys; heads: 1, the number of key heads, or
            that of query heads. -1, and positions that the call has no query or key for, are empty places.
        join: "softmax": one softmax over all pairs of the query, in which a key that it reads in several groups counts
            as often; or "mean".
        mean_epsilon: see above; only for "mean".
        labels_count: what terms look up their labels by: "positions", or "places" of query and key in the lists of
            their group.
        first_place: the query at a place reads the keys from that place plus this number on; None: from the first on.
    """

    queries: Tensor
    keys: Tensor
    join: str = SOFTMAX
    mean_epsilon: float = 0.0
    labels_count: str = POSITIONS
    first_place: int | None = None
    kind: ClassVar[str] = "groups"
    tensor_names: ClassVar[tuple[str, ...]] = ("queries", "keys")
    number_names: ClassVar[tuple[str, ...]] = ("join", "mean_epsilon", "labels_count", "first_place")

    def check(self, states: States) -> None:
        """Raise InputError for tensors or numbers that do not fit the call."""
        self.check_word("join", (SOFTMAX, MEAN))
        self.check_word("labels_count", (POSITIONS, PLACES))
        epsilon = self.mean_epsilon
        if isinstance(epsilon, bool) or not isinstance(epsilon, float | int) or not 0 <= epsilon <= 1e30:
            raise InputError(f"KeyGroups.mean_epsilon={shown(epsilon)} must be a finite number of at least 0.")
        if self.first_place is not None and not is_integer(self.first_place):
            raise InputError(f"KeyGroups.first_place={shown(self.first_place)} must be an integer or None.")
        self.check_tensor("queries", states, {"groups": None, "places": None})
        self.check_tensor("keys", states, {"groups": None, "places": None})
        if self.queries.shape[1:3] != self.keys.shape[1:3]:
            raise InputError(
                f"KeyGroups.queries has shape {list(self.queries.shape)} and keys {list(self.keys.shape)}; the heads "
                "and groups (second and third dimension) must be equal."
            )

    def groups(self) -> Groups:
        """Return the groups."""
        queries, keys = self.queries.long(), self.keys.long()
        batch_size = max(queries.shape[0], keys.shape[0])
        return Groups(queries.expand(batch_size, -1, -1, -1), keys.expand(batch_size, -1, -1, -1))

    def tiles(self, layout: Layout, tokens: TokenMask, sizes: Sizes, only: Tensor | None = None) -> Iterator[Tiles]:
        """Yield the tiles of groups."""
        return group_tiles(self.queries.long(), self.keys.long(), layout, sizes)

    def work(self, layout: Layout, sizes: Sizes) -> TileWork:
        """Return how much the tiles hold; in decoding at most one group for each query."""
        places, width = self.queries.shape[3], self.keys.shape[3]
        num_groups = layout.num_heads * self.queries.shape[2]
        if layout.num_queries < FEW_QUERIES * layout.num_keys:
            rows = min(layout.num_rows, num_groups * places)
            return TileWork(rows * width, rows, rows * width)
        return TileWork(num_groups * places * width, num_groups * places, num_groups * width)

    def of_query(self, query: int, position: int) -> ChosenKeys:
        """Return the groups that hold one query, which keep their places."""
        found = self.groups()
        holding = holding_groups(found.queries, position)
        return replace(self, queries=of_groups(found.queries, holding), keys=of_groups(found.keys, holding))

    def place_counts(self, layout: Layout, sizes: Sizes) -> Tensor:
        """Return how many places of groups hold each query, [heads of all examples, queries]."""
        return place_counts(self.queries.long(), layout, sizes)


@dataclass(frozen=True, eq=False)
class ChunkedOrder(GroupedKeys):
    """Positions in an order per head, cut into chunks: a query reads its own chunk and the neighbouring ones.

    It is the attention of Reformer (arXiv:2001.04451), where positions are sorted by bucket, once for each round. One
    softmax joins the pairs of all rounds. The chunks of all rounds form one circle, as in the authors' code: those
    before the first chunk of a round are the last ones of the round before, and no chunk is read twice. Each round is
    filled up to whole chunks with empty places.

    Attributes:
        order: int [B or 1, heads, R, L], for each of R rounds positions, on one axis of queries and keys; -1, and
            positions without a key, are empty places. heads: 1, the number of key heads, or that of query heads.
        chunk_tokens: how many places a chunk has.
        chunks_before, chunks_after: how many chunks before and after its own a query reads.
        buckets: int, of the shape of `order`; only pairs of equal buckets are read. None: all pairs are.
        reads_self_last: a query reads itself only if it may read no other key in any round (-inf of a term forbids).
        counts_duplicates: a key that a query meets in several rounds counts as often; False: once (the paper's
            equation 16, which the authors' code leaves out).
        reads: instead of the circle, the numbers of the chunks that each chunk reads, itself included: int [B or 1,
            heads, chunks of all rounds, n]; -1: none. So each document can have a circle of its own.
        unit_keys: keys are read at length 1. Where they are the queries, one tensor, both are gathered at once.
    """

    order: Tensor
    chunk_tokens: int
    chunks_before: int = 1
    chunks_after: int = 0
    buckets: Tensor | None = None
    reads_self_last: bool = True
    counts_duplicates: bool = True
    reads: Tensor | None = None
    unit_keys: bool = False
    kind: ClassVar[str] = "order"
    tensor_names: ClassVar[tuple[str, ...]] = ("order", "buckets", "reads")
    number_names: ClassVar[tuple[str, ...]] = (
        "chunk_tokens",
        "chunks_before",
        "chunks_after",
        "reads_self_last",
        "counts_duplicates",
        "unit_keys",
    )

    def check(self, states: States) -> None:
        """Raise InputError for tensors or numbers that do not fit the call."""
        self.check_count("chunk_tokens", 1)
        self.check_count("chunks_before", 0)
        self.check_count("chunks_after", 0)
        if states.is_cross:
            raise InputError("ChunkedOrder orders tokens of one axis, but cross=True: use KeyGroups.")
        self.check_tensor("order", states, {"rounds": None, "places": None})
        if self.buckets is not None:
            self.check_tensor("buckets", states, {"rounds": None, "places": None})
            if self.buckets.shape != self.order.shape:
                raise InputError(
                    f"ChunkedOrder.buckets has shape {list(self.buckets.shape)}, and order {list(self.order.shape)}; "
                    "they must be equal."
                )
        if self.reads is not None:
            self.check_tensor("reads", states, {"chunks": self.num_chunks, "chunks that each reads": None})

    @property
    def num_chunks(self) -> int:
        """The number of chunks of all rounds."""
        return self.order.shape[2] * -(-self.order.shape[3] // self.chunk_tokens)

    def counts(
        self, layout: Layout, tokens: TokenMask, num_key_heads: int, query_start: Tensor | None = None
    ) -> Tensor:
        """Return in how many rounds each pair meets."""
        counts = super().counts(layout, tokens, num_key_heads, query_start)
        return counts if self.counts_duplicates else counts.clamp(max=1)

    def groups(self) -> Groups:
        """Return one group for each chunk."""
        order = self.chunks(self.order.long())
        if self.buckets is None:
            return Groups(order, self.read_chunks(order))
        buckets = self.chunks(self.buckets.long())
        return Groups(order, self.read_chunks(order), buckets, self.read_chunks(buckets))

    def tiles(self, layout: Layout, tokens: TokenMask, sizes: Sizes, only: Tensor | None = None) -> Iterator[Tiles]:
        """Yield the tiles of chunks."""
        order = self.chunks(self.order.long())
        buckets = None if self.buckets is None else self.chunks(self.buckets.long())
        reads, circle = self.reads, None
        if reads is None:
            circle = self.neighbours(order.shape[2])
            numbers = torch.arange(order.shape[2], device=order.device)
            steps = torch.arange(-circle[0], circle[1] + 1, device=order.device)
            reads = ((numbers[:, None] + steps) % max(1, len(numbers)))[None, None]
        chunks = Chunks(order, buckets, reads.long(), circle, self.order.shape[2], not self.counts_duplicates)
        return chunk_tiles(chunks, layout, sizes, only)

    def has_single_rows(self, layout: Layout) -> bool:
        """Return whether there is one round, in which no position stands twice; nothing is asked of other devices."""
        is_asked = self.order.shape[2] == 1 and self.order.device.type == "cpu"
        return is_asked and stand_once(in_range(self.order[:, :, 0], layout.num_keys), layout.num_keys)

    def work(self, layout: Layout, sizes: Sizes) -> TileWork:
        """Return how much the tiles hold; in decoding the chunks that one query reads in each round."""
        num_read = sum(self.neighbours(self.num_chunks)) + 1 if self.reads is None else self.reads.shape[3]
        width = num_read * self.chunk_tokens
        if layout.num_queries < FEW_QUERIES * layout.num_keys:
            rows = layout.num_rows * self.order.shape[2]
            return TileWork(rows * width, rows, rows * width)
        rows = layout.num_heads * self.num_chunks * self.chunk_tokens
        return TileWork(rows * width, rows, rows if self.reads is None else rows * num_read)

    def of_query(self, query: int, position: int) -> ChosenKeys:
        """Return an order of the chunks that hold one query, and after them those that each of these reads."""
        found = self.groups()
        holding = holding_groups(found.queries, position)
        count, width = holding.shape[2], found.keys.shape[3] // self.chunk_tokens
        numbers = torch.arange(count * (1 + width), device=holding.device).view(-1, 1)
        # no query of the chunks that are read, which may hold this one once more, reads anything
        reads = torch.where(numbers < count, count + numbers * width + numbers.new_tensor(range(width)), -1)

        def with_read(queries: Tensor, keys: Tensor) -> Tensor:
            own, read = of_groups(queries, holding), of_groups(keys, holding)
            return torch.cat((own.flatten(2), read.flatten(2)), 2)[:, :, None]

        buckets = None
        if found.query_buckets is not None and found.key_buckets is not None:
            buckets = with_read(found.query_buckets, found.key_buckets)
        return replace(self, order=with_read(found.queries, found.keys), buckets=buckets, reads=reads[None, None])

    def chunks(self, places: Tensor) -> Tensor:
        """Return places [B, heads, R, L] as chunks of all rounds, [B, heads, chunks, places], filled up with -1."""
        filled = pad(places, (0, -places.shape[3] % self.chunk_tokens), value=-1)
        num_chunks = filled.shape[2] * (filled.shape[3] // self.chunk_tokens)
        # a compiler cannot join the axes of rounds and places for every number of places
        return torch.cat(filled.unbind(2), 2).unflatten(2, (num_chunks, self.chunk_tokens))

    def neighbours(self, num_chunks: int) -> tuple[int, int]:
        """Return how many chunks before and after its own a query reads, none of them twice."""
        before = min(self.chunks_before, max(0, num_chunks - 1))
        return before, min(self.chunks_after, max(0, num_chunks - 1 - before))

    def read_chunks(self, chunks: Tensor) -> Tensor:
        """Return what the queries of each chunk read, [B, heads, chunks, places]."""
        if self.reads is not None:
            return read_listed(chunks, self.reads)
        before, after = self.neighbours(chunks.shape[2])
        return torch.cat([chunks.roll(step, 2) for step in range(before, -after - 1, -1)], 3)
