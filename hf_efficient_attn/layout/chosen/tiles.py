"""Tiles: chosen pairs as small rectangles of queries and keys, the form in which chosen keys are computed."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Sizes(NamedTuple):
    """What a call is like, as far as its tiles depend on it.

    Attributes:
        most_pairs: of the tiles that are computed together.
        key_cost: time of a key that a tile reads, however many queries it has, in scores of the tile.
    """

    batch_size: int
    num_heads: int
    num_key_heads: int
    most_pairs: int
    key_cost: float = 0.0


class TileWork(NamedTuple):
    """How much the tiles of one example hold, in all heads: pairs, and rows of queries and keys that are gathered.

    num_listed: pairs that a list names, of which masks are made, once for all heads that share them.
    """

    num_pairs: int
    num_query_rows: int
    num_key_rows: int
    num_listed: int = 0


class Rounds(NamedTuple):
    """Where queries and keys of tiles lie in the rounds of an order, to count how often each pair meets.

    Attributes:
        query_reads: the chunks that a query reads in each round, [sets, tiles, queries, rounds, n].
        key_chunks: the chunk of a key in each round, [sets, places, rounds]; -1: it is in none, which no query reads.
        query_buckets, key_buckets: [sets, tiles, queries, rounds] and [sets, places, rounds]; None: all are alike.
    """

    query_reads: Tensor
    key_chunks: Tensor
    query_buckets: Tensor | None
    key_buckets: Tensor | None


@dataclass(frozen=True, eq=False)
class Tiles:
    """Tiles of equal size, in sets: the tiles of one set read the keys of one head, in order, and may share them.

    Attributes:
        examples, key_heads: [sets], where the keys of a set are.
        heads: of the queries, [sets, 1 or tiles, 1 or queries].
        queries: numbers of queries of the call, [sets, tiles, queries]; -1: an empty place.
        keys: indices of keys, [sets, places]; -1: an empty place. Tile t reads `tile_keys` of these places from
            t * key_step on.
        first_head, stop_head: the range of example * num_heads + head in which all queries lie.
        query_buckets, key_buckets: of the shapes of `queries` and `keys`; only pairs of equal buckets are read.
        query_places: the places of the queries in their group, [queries], or [sets, 1, 1] of single queries.
        rounds: to let each pair count once; None: a pair counts as often as tiles hold it.
        listed: the places of the keys that are chosen, [queries, k], alike in all sets, as are `queries`, each repeated
            for its heads, and `keys`; the number of places: none. None: all are chosen.
        are_diagonal: whether query and key i of each tile are the same token or empty, all of them neighbours.
        counts: how often each pair counts, broadcasts to [sets, tiles, queries, keys]; None: once.
        own_place: from which place on the keys of a set are its queries, one tile after the other; None: they are not.
    """

    examples: Tensor
    heads: Tensor
    key_heads: Tensor
    queries: Tensor
    keys: Tensor
    tile_keys: int
    key_step: int
    first_head: int
    stop_head: int
    query_buckets: Tensor | None = None
    key_buckets: Tensor | None = None
    query_places: Tensor | None = None
    rounds: Rounds | None = None
    counts: Tensor | None = None
    listed: Tensor | None = None
    are_diagonal: bool = False
    own_place: int | None = None

    def of_sets(self, sets: Tensor) -> "Tiles":
        """Return some of the sets, by their numbers, of tiles without rounds."""
        names = ("examples", "heads", "key_heads", "queries", "keys", "query_buckets", "key_buckets", "counts")
        chosen: dict[str, Any] = {name: getattr(self, name) for name in names}
        if self.query_places is not None and self.query_places.ndim == 3:
            chosen["query_places"] = self.query_places
        own: dict[str, Any] = {name: None if each is None else each[sets] for name, each in chosen.items()}
        return replace(self, **own)

    def members(self) -> Tensor | None:
        """Return which pairs are chosen, bool [1, 1, queries, keys]; None: all are."""
        if self.listed is None:
            return None
        members = torch.zeros(len(self.listed), self.tile_keys + 1, dtype=torch.bool, device=self.keys.device)
        return self.repeated(members.scatter_(1, self.listed, True)[:, :-1])

    def repeated(self, rows: Tensor) -> Tensor:
        """Return rows [listed queries, keys] for each head of a query, [1, 1, queries, keys]."""
        group = self.queries.shape[2] // len(rows)
        return (rows if group == 1 else rows.repeat_interleave(group, 0))[None, None]

    def of_keys(self, tensor: Tensor) -> Tensor:
        """Return a contiguous tensor [sets, places, ...] of the keys as that of each tile, overlapping views.

        The result is [sets, tiles, keys of a tile, ...].
        """
        sets, step = tensor.shape[0], tensor.stride(1)
        shape = (sets, self.queries.shape[1], self.tile_keys, *tensor.shape[2:])
        return tensor.as_strided(shape, (tensor.stride(0), self.key_step * step, *tensor.stride()[1:]))

    def own_keys(self, tensor: Tensor) -> Tensor:
        """Return the part of a tensor [sets, places, ...] that is of the queries, [sets, tiles, queries, ...]."""
        assert self.own_place is not None
        own = tensor[:, self.own_place : self.own_place + self.queries[0].numel()]
        return own.unflatten(1, self.queries.shape[1:])

    def added_keys(self, blocks: Tensor) -> Tensor:
        """Return [sets, places, width]: the sums over all tiles of what [sets, tiles, keys of a tile, width] adds."""
        num_tiles, step = self.queries.shape[1], self.key_step
        last = self.tile_keys - step
        if num_tiles == 1 or last == 0:
            return blocks.flatten(1, 2)
        # the last keys of all tiles are different ones, and so are those before, the last but one of the next tiles
        total = blocks.new_empty(*self.keys.shape, blocks.shape[3])
        before, end = last - step, last + (num_tiles - 1) * step
        total[:, :before] = 0
        total[:, before:last] = blocks[:, 0, before:last]
        both = total[:, last:end].unflatten(1, (num_tiles - 1, step))
        torch.add(blocks[:, :-1, last:], blocks[:, 1:, before:last], out=both)
        total[:, end:] = blocks[:, -1, last:]
        for first in range(0, before, step):
            shifted = total[:, first : first + num_tiles * step].unflatten(1, (num_tiles, step))
            shifted.add_(blocks[:, :, first : first + step])
        return total


def ranges(count: int, step: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of parts of at most `step` of `count`.

    >>> list(ranges(5, 2))
    [(0, 2), (2, 4), (4, 5)]
    """
    for start in range(0, count, step):
        yield start, min(count, start + step)


def single_tiles(
    examples: Tensor, heads: Tensor, key_heads: Tensor, queries: Tensor, keys: Tensor, bounds: tuple[int, int],
    **options: Any,
) -> Tiles:  # fmt: skip
    """Return sets of one tile each: queries [sets, queries], keys [sets, keys], heads [sets] or [sets, queries]."""
    heads = heads[:, None, None] if heads.ndim == 1 else heads[:, None]
    return Tiles(examples, heads, key_heads, queries[:, None], keys, keys.shape[1], 0, *bounds, **options)


def rows_of_call(positions: Tensor, first: int, num_queries: int) -> Tensor:
    """Return the numbers of the call's queries at positions of their axis; -1 for positions of no query."""
    rows = positions - first
    return torch.where((rows >= 0) & (rows < num_queries), rows, -1)


def own_head(head: Tensor, num_heads: int, num_shared: int) -> Tensor:
    """Return which of `num_shared` the heads belong to, of which each serves equally many of `num_heads`."""
    return head // (num_heads // num_shared)
