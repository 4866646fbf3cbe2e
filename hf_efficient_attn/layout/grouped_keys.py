"""Keys that are selected in groups, or in chunks of an order, and the tiles in which they are computed."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.errors import InputError
from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.layout.listed_keys import ChosenBlocks, ChosenTokens
from hf_efficient_attn.layout.operator_args import to_text
from hf_efficient_attn.layout.selected_keys import (
    MEAN,
    PLACES,
    POSITIONS,
    SOFTMAX,
    ChosenKeys,
    GroupedKeys,
    Groups,
    Rounds,
    Sizes,
    States,
    Tiles,
    TileWork,
    holding_groups,
    in_range,
    of_groups,
    own_head,
    ranges,
    rows_of_call,
    single_tiles,
)
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.messages import shown
from hf_efficient_attn.patterns.serialization import is_integer

# The tiles of groups of keys, and of chunks of an order.


# a call with fewer queries than this fraction of the keys searches for the groups that hold its queries
FEW_QUERIES = 0.25


class Chunks(NamedTuple):
    """Chunks of positions, [batch or 1, heads, chunks, places], and which of them the queries of each attend to.

    Attributes:
        buckets: in the shape of `order`; only pairs of equal buckets are selected. None: all pairs are.
        reads: the chunks that each chunk attends to, [batch or 1, heads, chunks, n]; numbers out of range are none.
        circle: (before, after) if `reads` are the neighbours on a circle of all chunks, in their order; else None.
        num_rounds: the number of rounds, each of which has the same number of chunks.
        counts_once: whether each pair counts once, in however many rounds it meets.
    """

    order: Tensor
    buckets: Tensor | None
    reads: Tensor
    circle: tuple[int, int] | None
    num_rounds: int
    counts_once: bool


def group_tiles(queries: Tensor, keys: Tensor, layout: Layout, sizes: Sizes) -> Iterator[Tiles]:
    """Yield the tiles of groups: queries [batch or 1, heads, groups, wq] and keys [batch or 1, heads, groups, wk]."""
    num_groups, num_places, width = *queries.shape[2:], keys.shape[3]
    num_sets = sizes.batch_size * sizes.num_heads * num_groups
    if num_sets * num_places * width == 0:
        return
    rows = rows_of_call(queries, layout.query_offset, layout.num_queries)
    # groups without other places, as in decoding, are not searched, since a search waits for the device
    if num_groups * num_places > layout.num_queries and layout.num_queries < FEW_QUERIES * layout.num_keys:
        yield from _few_of_groups(rows, keys, sizes)
        return
    most_places = max(1, min(num_places, sizes.most_pairs // width))
    per_tile = max(1, sizes.most_pairs // (most_places * width))
    for first, stop in ranges(num_sets, per_tile):
        number = torch.arange(first, stop, device=keys.device)
        example, head, group = _parts(number, sizes.num_heads, num_groups)
        own_keys, own_rows = (_of(each, example, head, sizes, group) for each in (keys, rows))
        bounds = (first // num_groups, (stop - 1) // num_groups + 1)
        for start, end in ranges(num_places, most_places):
            places = torch.arange(start, end, device=keys.device)
            key_heads = own_head(head, sizes.num_heads, sizes.num_key_heads)
            yield single_tiles(example, head, key_heads, own_rows[:, start:end], own_keys, bounds, query_places=places)


def _few_of_groups(rows: Tensor, keys: Tensor, sizes: Sizes) -> Iterator[Tiles]:
    """Yield one tile for each place that holds a query of the call."""
    rows, keys = (_of_all(each, sizes) for each in (rows, keys))
    found = torch.nonzero(rows >= 0)
    for first, stop in ranges(len(found), max(1, sizes.most_pairs // keys.shape[3])):
        example, head, group, place = found[first:stop].unbind(1)
        key_heads = own_head(head, sizes.num_heads, sizes.num_key_heads)
        queries = rows[example, head, group, place][:, None]
        bounds = (0, sizes.batch_size * sizes.num_heads)
        places = place[:, None, None]
        yield single_tiles(example, head, key_heads, queries, keys[example, head, group], bounds, query_places=places)


def chunk_tiles(chunks: Chunks, layout: Layout, sizes: Sizes, only: Tensor | None) -> Iterator[Tiles]:
    """Yield the tiles of chunks, of several heads or a part of one head; `only`: the queries whose tiles to yield."""
    num_chunks, width = chunks.order.shape[2:]
    num_heads = sizes.batch_size * sizes.num_heads
    pairs = width * width * chunks.reads.shape[3]
    if num_chunks * pairs == 0:
        return
    if only is not None or layout.num_queries < FEW_QUERIES * layout.num_keys:
        yield from _few_of_chunks(chunks, layout, sizes, only)
        return
    most_chunks = max(1, min(num_chunks, sizes.most_pairs // pairs))
    most_heads = max(1, sizes.most_pairs // (most_chunks * pairs))
    for first, stop in ranges(num_heads, most_heads):
        number = torch.arange(first, stop, device=chunks.order.device)
        for part in ranges(num_chunks, most_chunks):
            yield _of_chunks(chunks, layout, sizes, number, part, (first, stop))


def _of_chunks(
    chunks: Chunks, layout: Layout, sizes: Sizes, number: Tensor, part: tuple[int, int], bounds: tuple[int, int]
) -> Tiles:
    """Return the tiles of a range of chunks of these heads."""
    num_chunks, width = chunks.order.shape[2:]
    example, head = number // sizes.num_heads, number % sizes.num_heads
    order, own = _of(chunks.order, example, head, sizes), slice(*part)
    of_heads = None if chunks.buckets is None else _of(chunks.buckets, example, head, sizes)
    if chunks.circle is None:
        # every chunk is a set of its own
        example, head = (each.repeat_interleave(part[1] - part[0]) for each in (example, head))
        listed = _of(chunks.reads, number // sizes.num_heads, number % sizes.num_heads, sizes)[:, own]
        queries, keys = order[:, own].flatten(0, 1)[:, None], _listed(order, listed)
        buckets = None if of_heads is None else (of_heads[:, own].flatten(0, 1)[:, None], _listed(of_heads, listed))
        step, num_read, own_place = 0, listed.shape[2], None
    else:
        before, after = chunks.circle
        read = torch.arange(part[0] - before, part[1] + after, device=number.device) % num_chunks
        queries, keys = order[:, own], order[:, read].flatten(1)
        buckets = None if of_heads is None else (of_heads[:, own], of_heads[:, read].flatten(1))
        step, num_read, own_place = width, before + 1 + after, before * width
        own_place = own_place if layout.num_queries == layout.num_keys else None
    return Tiles(
        examples=example,
        heads=head[:, None, None],
        key_heads=own_head(head, sizes.num_heads, sizes.num_key_heads),
        queries=rows_of_call(queries, layout.query_offset, layout.num_queries),
        keys=keys,
        tile_keys=width * num_read,
        key_step=step,
        first_head=bounds[0],
        stop_head=bounds[1],
        query_buckets=None if buckets is None else buckets[0],
        key_buckets=None if buckets is None else buckets[1],
        rounds=_rounds(chunks, layout, sizes, example, head, queries, keys) if chunks.counts_once else None,
        own_place=own_place,
    )


def _listed(chunks: Tensor, numbers: Tensor) -> Tensor:
    """Return the places of the chunks in each list; -1 for the places of chunks that do not exist.

    Shapes: chunks [heads, chunks, places] and numbers [heads, lists, n] → [heads · lists, n · places].
    """
    filled = pad(chunks, (0, 0, 0, 1), value=-1)
    heads = torch.arange(len(chunks), device=chunks.device)[:, None, None]
    return filled[heads, in_range(numbers, chunks.shape[1])].flatten(2).flatten(0, 1)


def _few_of_chunks(chunks: Chunks, layout: Layout, sizes: Sizes, only: Tensor | None) -> Iterator[Tiles]:
    """Yield one tile for each place that holds a query of the call, or one of `only`."""
    order, reads = _of_all(chunks.order, sizes), _of_all(chunks.reads, sizes)
    buckets = None if chunks.buckets is None else _of_all(chunks.buckets, sizes)
    # an additional chunk of empty places
    filled, filled_buckets = pad(order, (0, 0, 0, 1), value=-1), None
    if buckets is not None:
        filled_buckets = pad(buckets, (0, 0, 0, 1), value=-1)
    rows = rows_of_call(order, layout.query_offset, layout.num_queries)
    is_own = rows >= 0
    if only is not None:
        is_own = is_own & only.gather(2, rows.clamp(min=0).flatten(2)).view(rows.shape)
    found = torch.nonzero(is_own)
    for first, stop in ranges(len(found), max(1, sizes.most_pairs // (order.shape[3] * reads.shape[3]))):
        at = example, head, chunk, _ = found[first:stop].unbind(1)
        listed = reads[example, head, chunk]
        around = (example[:, None], head[:, None], in_range(listed, order.shape[2]))
        keys, queries = filled[around].flatten(1), order[at][:, None, None]
        of_keys = None if filled_buckets is None else filled_buckets[around].flatten(1)
        counts = None
        if only is not None:
            # these queries attend only to themselves, as often as they occur among their keys
            is_self = keys == queries[:, 0]
            if buckets is not None and of_keys is not None:
                is_self, of_keys = is_self & (of_keys == buckets[at][:, None]), buckets[at][:, None]
            keys, counts = queries[:, 0], is_self.sum(1)[:, None, None, None]
        yield single_tiles(
            example,
            head,
            own_head(head, sizes.num_heads, sizes.num_key_heads),
            rows[at][:, None],
            keys,
            (0, sizes.batch_size * sizes.num_heads),
            query_buckets=None if buckets is None else buckets[at][:, None, None],
            key_buckets=of_keys,
            counts=counts,
            rounds=_rounds(chunks, layout, sizes, example, head, queries, keys) if chunks.counts_once else None,
        )


def _rounds(
    chunks: Chunks, layout: Layout, sizes: Sizes, example: Tensor, head: Tensor, queries: Tensor, keys: Tensor
) -> Rounds:
    """Return where the queries and keys of tiles lie in every round; a position occurs at most once per round.

    Args:
        queries, keys: positions, [sets, tiles, queries] and [sets, places].
    """
    num_chunks, width = chunks.order.shape[2:]
    # [batch, heads, rounds, places of a round]
    order = chunks.order.flatten(2).unflatten(2, (chunks.num_rounds, num_chunks // chunks.num_rounds * width))
    inside = in_range(order, layout.num_keys)
    chunk = torch.arange(num_chunks * width, device=order.device).view(order.shape[2:]) // width

    def at(values: Tensor, positions: Tensor) -> Tensor:
        """Return the values of positions [sets, ...] in every round, [sets, ..., rounds]; -1 if it lacks them."""
        table = torch.full((*order.shape[:3], layout.num_keys + 1), -1, device=order.device)
        table = table.scatter(3, inside, values.expand_as(order)).transpose(2, 3)
        table[:, :, layout.num_keys] = -1
        flat = in_range(positions, layout.num_keys).flatten(1)
        first = example if len(table) > 1 else torch.zeros_like(example)
        found = table[first[:, None], own_head(head, sizes.num_heads, table.shape[1])[:, None], flat]
        return found.unflatten(1, positions.shape[1:])

    own = at(chunk, queries)
    listed = _of(chunks.reads, example, head, sizes)
    # an additional chunk that attends to none; -2 is the chunk of no key
    listed = pad(listed, (0, 0, 0, 1), value=-2)
    listed = torch.where((listed >= 0) & (listed < num_chunks), listed, -2)
    index = in_range(own, num_chunks).flatten(1)[..., None].expand(-1, -1, listed.shape[2])
    reads = listed.gather(1, index).unflatten(1, own.shape[1:])
    if chunks.buckets is None:
        return Rounds(reads, at(chunk, keys), None, None)
    buckets = chunks.buckets.flatten(2).view(order.shape)
    return Rounds(reads, at(chunk, keys), at(buckets, queries), at(buckets, keys))


def _of(tensor: Tensor, example: Tensor, head: Tensor, sizes: Sizes, *group: Tensor) -> Tensor:
    """Return the part of a tensor [batch or 1, heads, ...] for the example and head of each set, a copy [sets, ...].

    group: the group of each set, in a tensor [batch or 1, heads, groups, ...]; without it, the part has all groups.
    """
    own = own_head(head, sizes.num_heads, tensor.shape[1])
    return tensor[(example if tensor.shape[0] > 1 else torch.zeros_like(example), own, *group)]


def _of_all(tensor: Tensor, sizes: Sizes) -> Tensor:
    """Return a tensor [batch or 1, heads, ...] expanded to every example and every query head."""
    tensor = tensor.repeat_interleave(sizes.num_heads // tensor.shape[1], 1)
    return tensor.expand(sizes.batch_size, -1, *[-1] * (tensor.ndim - 2))


def _parts(number: Tensor, num_heads: int, num_groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return example, head and group of each number that counts them in this order."""
    row = number // num_groups
    return row // num_heads, row % num_heads, number % num_groups


def read_listed(chunks: Tensor, reads: Tensor) -> Tensor:
    """Return the places of the chunks that each chunk attends to, [B, heads, chunks, n · places]; -1: no place.

    Shapes: chunks [B or 1, heads or 1, chunks, places], reads [B or 1, heads or 1, chunks, n].
    """
    # an additional chunk of empty places
    filled = pad(chunks, (0, 0, 0, 1), value=-1)
    # broadcast by a sum, since a comparison of sizes would make them constants for a compiler
    reads = in_range(reads, chunks.shape[2]) + torch.zeros_like(chunks[..., :1])
    filled = filled.expand(reads.shape[0], reads.shape[1], -1, -1)
    examples = torch.arange(reads.shape[0], device=reads.device)[:, None, None, None]
    heads = torch.arange(reads.shape[1], device=reads.device)[:, None, None]
    return filled[examples, heads, reads].flatten(3)


def stand_once(numbers: Tensor, count: int) -> bool:
    """Return whether no number below `count` occurs twice in its row; numbers: int [..., places], none above `count`.

    >>> stand_once(torch.tensor([[0, 1, 2, 2]]), 2), stand_once(torch.tensor([[0, 1, 0, 2]]), 2)
    (True, False)
    """
    counts = torch.zeros(*numbers.shape[:-1], count + 1, dtype=torch.int32, device=numbers.device)
    counts.scatter_add_(-1, numbers, torch.ones_like(numbers, dtype=torch.int32))
    return bool((counts[..., :-1] <= 1).all())


@dataclass(frozen=True, eq=False)
class KeyGroups(GroupedKeys):
    """Groups of queries and keys: a query of a group attends to its keys that the pattern and the masks allow.

    A query may be in no group (its output is 0), in one, or in several. With `join="mean"` its output is the mean over
    its groups, as in the Routing Transformer (arXiv:2003.05997): the sum of the softmax outputs of its groups, divided
    by the number of these groups plus `mean_epsilon`.

    Attributes:
        queries, keys: int [B or 1, heads, G, wq] and [B or 1, heads, G, wk]: positions of queries (in cached decoding
            the call has the last positions) and indices of keys; heads: 1, the number of key heads, or that of query
            heads. -1, and positions for which the call has no query or key, are empty slots.
        join: "softmax": one softmax over all pairs of the query, where a key counts once for each group that it shares
            with the query; or "mean".
        mean_epsilon: added to the number of groups, see above; only for "mean".
        labels_count: from what terms compute their labels: the "positions" of query and key, or their "places" in the
            lists of their group.
        first_place: the query at index i of its group attends to the keys of the group from index i + first_place on;
            None: to all keys of the group.
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
        """Return how much the tiles hold; in decoding, at most one group for each query."""
        places, width = self.queries.shape[3], self.keys.shape[3]
        num_groups = layout.num_heads * self.queries.shape[2]
        if layout.num_queries < FEW_QUERIES * layout.num_keys:
            rows = min(layout.num_rows, num_groups * places)
            return TileWork(rows * width, rows, rows * width)
        return TileWork(num_groups * places * width, num_groups * places, num_groups * width)

    def of_query(self, query: int, position: int) -> ChosenKeys:
        """Return the groups that hold one query, with unchanged places."""
        found = self.groups()
        holding = holding_groups(found.queries, position)
        return replace(self, queries=of_groups(found.queries, holding), keys=of_groups(found.keys, holding))

    def place_counts(self, layout: Layout, sizes: Sizes) -> Tensor:
        """Return how many places of groups hold each query, [heads of all examples, queries]."""
        own = in_range(self.queries.long() - layout.query_offset, layout.num_queries)
        rows = _of_all(own, sizes).flatten(2).flatten(0, 1)
        counts = torch.zeros(len(rows), layout.num_queries + 1, dtype=torch.long, device=rows.device)
        return counts.scatter_add_(1, rows, torch.ones_like(rows))[:, :-1]


@dataclass(frozen=True, eq=False)
class ChunkedOrder(GroupedKeys):
    """An order of positions per head, cut into chunks: a query attends to its own and the neighbouring chunks.

    This is the attention of Reformer (arXiv:2001.04451), where positions are sorted by bucket, once for each round. One
    softmax joins the pairs of all rounds. The chunks of all rounds form one circle, as in the authors' code: before the
    first chunk of a round come the last chunks of the previous round. A query attends to no chunk twice. Each round is
    filled up to whole chunks with empty slots.

    Attributes:
        order: int [B or 1, heads, R, L]: for each of R rounds the positions, which are those of queries and of keys;
            -1, and positions without a key, are empty slots. heads: 1, the number of key heads, or that of query heads.
        chunk_tokens: the length of a chunk.
        chunks_before, chunks_after: how many chunks before and after its own a query attends to.
        buckets: int, in the shape of `order`; only pairs of equal buckets are allowed. None: all pairs are.
        attends_to_self_last: a query attends to itself only if no other key is allowed in any round (a term of -inf
            forbids a key).
        counts_duplicates: a key that a query meets in several rounds counts several times, as in the authors' code;
            False: once, as in the paper's equation 16.
        reads: instead of the circle, the numbers of the chunks that each chunk attends to, itself included: int [B or
            1, heads, chunks of all rounds, n]; -1: none. With it each document can have a circle of its own.
        unit_keys: keys are scaled to length 1. If keys and queries are one tensor, both are gathered at once.
    """

    order: Tensor
    chunk_tokens: int
    chunks_before: int = 1
    chunks_after: int = 0
    buckets: Tensor | None = None
    attends_to_self_last: bool = True
    counts_duplicates: bool = True
    reads: Tensor | None = None
    unit_keys: bool = False
    kind: ClassVar[str] = "order"
    tensor_names: ClassVar[tuple[str, ...]] = ("order", "buckets", "reads")
    number_names: ClassVar[tuple[str, ...]] = (
        "chunk_tokens",
        "chunks_before",
        "chunks_after",
        "attends_to_self_last",
        "counts_duplicates",
        "unit_keys",
    )

    def check(self, states: States) -> None:
        """Raise InputError for tensors or numbers that do not fit the call."""
        self.check_count("chunk_tokens", 1)
        self.check_count("chunks_before", 0)
        self.check_count("chunks_after", 0)
        if states.is_cross:
            raise InputError("ChunkedOrder orders the tokens of one sequence, but cross=True. Use KeyGroups.")
        self.check_tensor("order", states, {"rounds": None, "places": None})
        if self.buckets is not None:
            self.check_tensor("buckets", states, {"rounds": None, "places": None})
            if self.buckets.shape != self.order.shape:
                raise InputError(
                    f"ChunkedOrder.buckets has shape {list(self.buckets.shape)}, and order {list(self.order.shape)}; "
                    "they must be equal."
                )
        if self.reads is not None:
            self.check_tensor("reads", states, {"chunks": self.num_chunks, "chunks that each attends to": None})

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
        """Return whether there is one round without repeated positions; False off the CPU, which does not wait."""
        is_known = self.order.shape[2] == 1 and self.order.device.type == "cpu"
        return is_known and stand_once(in_range(self.order[:, :, 0], layout.num_keys), layout.num_keys)

    def work(self, layout: Layout, sizes: Sizes) -> TileWork:
        """Return how much the tiles hold; in decoding, the chunks of one query in each round."""
        num_read = sum(self.neighbours(self.num_chunks)) + 1 if self.reads is None else self.reads.shape[3]
        width = num_read * self.chunk_tokens
        if layout.num_queries < FEW_QUERIES * layout.num_keys:
            rows = layout.num_rows * self.order.shape[2]
            return TileWork(rows * width, rows, rows * width)
        rows = layout.num_heads * self.num_chunks * self.chunk_tokens
        return TileWork(rows * width, rows, rows if self.reads is None else rows * num_read)

    def of_query(self, query: int, position: int) -> ChosenKeys:
        """Return an order of the chunks that hold one query, followed by the chunks that each of these attends to."""
        found = self.groups()
        holding = holding_groups(found.queries, position)
        count, width = holding.shape[2], found.keys.shape[3] // self.chunk_tokens
        numbers = torch.arange(count * (1 + width), device=holding.device).view(-1, 1)
        # the chunks that are attended to may hold the query once more, so their own queries attend to nothing
        reads = torch.where(numbers < count, count + numbers * width + numbers.new_tensor(range(width)), -1)

        def with_read(queries: Tensor, keys: Tensor) -> Tensor:
            own, read = of_groups(queries, holding), of_groups(keys, holding)
            return torch.cat((own.flatten(2), read.flatten(2)), 2)[:, :, None]

        buckets = None
        if found.query_buckets is not None and found.key_buckets is not None:
            buckets = with_read(found.query_buckets, found.key_buckets)
        return replace(self, order=with_read(found.queries, found.keys), buckets=buckets, reads=reads[None, None])

    def chunks(self, places: Tensor) -> Tensor:
        """Return places [B, heads, R, L] as chunks of all rounds, [B, heads, chunks, places], padded with -1."""
        filled = pad(places, (0, -places.shape[3] % self.chunk_tokens), value=-1)
        num_chunks = filled.shape[2] * (filled.shape[3] // self.chunk_tokens)
        # a compiler cannot join the axes of rounds and places for every number of places
        return torch.cat(filled.unbind(2), 2).unflatten(2, (num_chunks, self.chunk_tokens))

    def neighbours(self, num_chunks: int) -> tuple[int, int]:
        """Return how many chunks before and after its own a query attends to, none of them twice."""
        before = min(self.chunks_before, max(0, num_chunks - 1))
        return before, min(self.chunks_after, max(0, num_chunks - 1 - before))

    def read_chunks(self, chunks: Tensor) -> Tensor:
        """Return the keys of the queries of each chunk, [B, heads, chunks, places]."""
        if self.reads is not None:
            return read_listed(chunks, self.reads)
        before, after = self.neighbours(chunks.shape[2])
        return torch.cat([chunks.roll(step, 2) for step in range(before, -after - 1, -1)], 3)


# A choice of keys without its tensors as JSON: an operator takes only tensors, numbers and text.


KINDS: dict[str, type[ChosenKeys]] = {each.kind: each for each in (ChosenBlocks, ChosenTokens, ChunkedOrder, KeyGroups)}


def write_chosen_text(chosen: ChosenKeys) -> str:
    """Return the kind and the numbers of a choice as JSON text, in code that torch can trace.

    >>> import torch
    >>> write_chosen_text(ChosenBlocks(torch.zeros(1, 1, 4, 2), 16))
    '{"kind": "blocks", "numbers": [16, 1, "document"]}'
    """
    # the text of a float is that of its JSON
    numbers = [str(each) if isinstance(each, float) else to_text(each) for each in chosen.numbers]
    return "{" + f'"kind": "{chosen.kind}", "numbers": [{", ".join(numbers)}]' + "}"


def read_selected_keys(text: str, tensors: list[Tensor | None]) -> ChosenKeys:
    """Return the choice of this text and these tensors."""
    data = json.loads(text)
    kind = KINDS[data["kind"]]
    named = zip(kind.tensor_names + kind.number_names, [*tensors, *data["numbers"]], strict=True)
    return kind(**dict(named))
