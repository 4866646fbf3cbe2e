"""The tiles of tokens that are listed for each query: neighbouring queries with all tokens that any of them reads.

On CPUs a row of keys costs a tile as much as dozens of scores, and neighbours often read the same: the more queries a
tile has, the fewer rows there are, and the more of its scores are of keys that a query does not read. Choices that are
drawn at random take tiles of hundreds of queries, which read nearly all keys; choices that are alike take smaller ones.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from hf_efficient_attn.layout.chosen.tiles import Sizes, Tiles, TileWork, own_head, ranges, single_tiles
from hf_efficient_attn.layout.layout import Layout

# queries of the smallest tile, and how many of these are the largest; about how many tokens it reads per token of a
# query, where the choice is not known; and in how many stretches of the largest they are counted where it is
NEIGHBOURS, MOST_NEIGHBOURS, TOKENS_PER_TOKEN, COUNTED_STRETCHES = 64, 8, 5, 2
STRETCH = NEIGHBOURS * MOST_NEIGHBOURS
# entries of a mask, and rows of keys that are computed together: memory that is soon used again
MOST_ENTRIES, MOST_KEY_ROWS = 1 << 22, 1 << 16


class Neighbours(NamedTuple):
    """Neighbouring queries, and what they read together.

    Attributes:
        keys: in ascending order.
        listed: the places among `keys` of the tokens of each query, [queries, k]; len(keys): none.
    """

    first: int
    stop: int
    keys: Tensor
    listed: Tensor


def token_tiles(tokens: Tensor, layout: Layout, sizes: Sizes) -> Iterator[Tiles]:
    """Yield tiles of queries and the tokens that they read; tokens: [batch or 1, heads, queries, k]."""
    if tokens.shape[2] * tokens.shape[3] * sizes.batch_size == 0:
        return
    on_cpu = tokens.device.type == "cpu"
    yield from (_neighbour_tiles if on_cpu else _query_tiles)(tokens, layout, sizes)


def token_work(tokens: Tensor, layout: Layout, sizes: Sizes) -> TileWork:
    """Return about how much the tiles of one example hold; tokens: [batch or 1, heads, queries, k].

    On CPUs some are counted, of the first example and head.
    """
    num_queries, num_chosen = tokens.shape[2:]
    num_shares = max(tokens.shape[1], sizes.num_key_heads)
    group = layout.num_heads // num_shares
    if tokens.device.type != "cpu" or torch.compiler.is_compiling() or not tokens.numel():
        num_read = min(layout.num_keys, TOKENS_PER_TOKEN * num_chosen)
        num_tiles = num_shares * -(-layout.num_queries // NEIGHBOURS)
        return TileWork(layout.num_rows * num_read, layout.num_rows, num_tiles * num_read, tokens[0].numel())
    stretches = list(ranges(num_queries, STRETCH))
    # in the middle of parts of equal length
    middles = {len(stretches) * (2 * part + 1) // (2 * COUNTED_STRETCHES) for part in range(COUNTED_STRETCHES)}
    pairs = keys = counted = 0
    for start, stop in (stretches[middle] for middle in middles):
        for tile in neighbours(tokens[0, 0, start:stop], start, layout.num_keys, group, sizes):
            pairs += (tile.stop - tile.first) * len(tile.keys)
            keys += len(tile.keys)
        counted += stop - start
    times = num_shares * num_queries / counted
    return TileWork(round(pairs * group * times), layout.num_rows, round(keys * times), tokens[0].numel())


def neighbours(named: Tensor, first: int, num_keys: int, group: int, sizes: Sizes) -> Iterator[Neighbours]:
    """Yield the tiles of a stretch of queries, in the size that costs least.

    Args:
        named: the tokens of each query, [queries of a stretch, k].
        first: the number of the first query.
        group: heads that share the keys.

    >>> sizes = Sizes(1, 1, 1, 100, key_cost=80)
    >>> [tile.keys.tolist() for tile in neighbours(torch.tensor([[0, -1], [2, 1], [2, 9]]), 0, 4, 1, sizes)]
    [[0, 1, 2]]
    """
    num_queries, width = len(named), num_keys + 2
    # numbers out of range become the first or the last column
    columns = (named.long() + 1).clamp_(0, num_keys + 1)
    parts = torch.arange(num_queries) // NEIGHBOURS * width
    # a power of 2, so that they can be joined in pairs
    num_parts = 1 << (-(-num_queries // NEIGHBOURS) - 1).bit_length()
    reads = torch.zeros(num_parts, width, dtype=torch.bool)
    reads.view(-1).index_fill_(0, (columns + parts[:, None]).flatten(), True)
    reads[:, 0] = reads[:, -1] = False
    length, reads = _cheapest(reads, num_queries, group, sizes)
    places = torch.empty(width, dtype=torch.long)
    for (start, stop), read in zip(ranges(num_queries, length), reads, strict=False):
        found = torch.nonzero(read)[:, 0]
        if found.numel():
            places.fill_(len(found))[found] = torch.arange(len(found))
            own = columns[start:stop]
            listed = places.index_select(0, own.flatten()).view_as(own)
            yield Neighbours(first + start, first + stop, found - 1, listed)


def _cheapest(reads: Tensor, num_queries: int, group: int, sizes: Sizes) -> tuple[int, Tensor]:
    """Return how many queries the tiles of a stretch have, and what each reads: that which costs least.

    reads: what the smallest tiles read, bool [tiles, keys].
    """
    length, best = NEIGHBOURS, (torch.inf, NEIGHBOURS, reads)
    most = min(MOST_ENTRIES, sizes.most_pairs) // group
    while True:
        rows = reads.sum(1)
        queries = (num_queries - length * torch.arange(len(rows))).clamp(0, length)
        if length > NEIGHBOURS and int((queries * rows).max()) > most:
            break
        best = min(best, (float((rows * (group * queries + sizes.key_cost)).sum()), length, reads), key=lambda x: x[0])
        if len(reads) == 1 or num_queries <= length:
            break
        length, reads = 2 * length, reads[0::2] | reads[1::2]
    return best[1:]


def _neighbour_tiles(tokens: Tensor, layout: Layout, sizes: Sizes) -> Iterator[Tiles]:
    """Yield tiles of neighbouring queries, with all tokens that any of them reads."""
    num_choices, num_queries = tokens.shape[1:3]
    num_shares = max(num_choices, sizes.num_key_heads)
    group = sizes.num_heads // num_shares
    for example in range(sizes.batch_size):
        for choice in range(num_choices):
            own = tokens[example if tokens.shape[0] > 1 else 0, choice]
            first, last = (number * num_shares // num_choices for number in (choice, choice + 1))
            for start, stop in ranges(num_queries, STRETCH):
                for tile in neighbours(own[start:stop], start, layout.num_keys, group, sizes):
                    yield from _of_shares(tile, example, (first, last), num_shares, group, sizes)


def _of_shares(
    tile: Neighbours, example: int, shares: tuple[int, int], num_shares: int, group: int, sizes: Sizes
) -> Iterator[Tiles]:
    """Yield the tiles of neighbouring queries in a range of shares: heads that read the same keys."""
    num_queries, num_keys = tile.stop - tile.first, len(tile.keys)
    queries = torch.arange(tile.first, tile.stop).repeat_interleave(group)
    most = max(1, min(MOST_KEY_ROWS // num_keys, sizes.most_pairs // (num_queries * group * num_keys)))
    for low, high in ranges(shares[1] - shares[0], most):
        share = torch.arange(shares[0] + low, shares[0] + high)
        heads = (share[:, None] * group + torch.arange(group)).repeat(1, num_queries)
        first_head, stop_head = (example * sizes.num_heads + (shares[0] + each) * group for each in (low, high))
        yield single_tiles(
            torch.full_like(share, example),
            heads,
            own_head(share, num_shares, sizes.num_key_heads),
            queries.expand(len(share), -1),
            tile.keys.expand(len(share), -1).contiguous(),
            (first_head, stop_head),
            listed=tile.listed,
        )


def _query_tiles(tokens: Tensor, layout: Layout, sizes: Sizes) -> Iterator[Tiles]:
    """Yield tiles of one query of the heads that share its keys."""
    num_queries, num_chosen = tokens.shape[2:]
    # heads of tiles: those that choose apart, or read other keys
    num_shares = max(tokens.shape[1], sizes.num_key_heads)
    group = sizes.num_heads // num_shares
    tokens = tokens.long()
    places = torch.arange(group, device=tokens.device)
    for first, stop in ranges(
        sizes.batch_size * num_queries, max(1, sizes.most_pairs // (num_chosen * sizes.num_heads))
    ):
        row = torch.arange(first, stop, device=tokens.device)
        example, query = row // num_queries, row % num_queries
        chosen = tokens[example if len(tokens) > 1 else torch.zeros_like(example), :, query]
        chosen = once(chosen, layout.num_keys)
        chosen = chosen.repeat_interleave(num_shares // chosen.shape[1], 1).flatten(0, 1)
        share = torch.arange(num_shares, device=tokens.device).repeat(len(row))
        example, query = (each.repeat_interleave(num_shares) for each in (example, query))
        bounds = ((first // num_queries) * sizes.num_heads, ((stop - 1) // num_queries + 1) * sizes.num_heads)
        heads = share[:, None] * group + places
        key_heads = own_head(share, num_shares, sizes.num_key_heads)
        yield single_tiles(example, heads, key_heads, query[:, None].expand(-1, group), chosen, bounds)


def once(numbers: Tensor, count: int) -> Tensor:
    """Return numbers [rows, heads, k] with -1 instead of those that are out of range, or named before in their row.

    >>> once(torch.tensor([[[3, 1, 3, 9]]]), 4).tolist() in ([[[3, 1, -1, -1]]], [[[-1, 1, 3, -1]]])
    True
    """
    inside = torch.where((numbers >= 0) & (numbers < count), numbers, count)
    places = torch.arange(numbers.shape[-1], device=numbers.device).expand_as(numbers)
    # what is read of it was written: one of the places that name a number
    stamps = numbers.new_empty(*numbers.shape[:-1], count + 1)
    stamps.scatter_(-1, inside, places)
    return torch.where((stamps.gather(-1, inside) == places) & (inside < count), numbers, -1)
