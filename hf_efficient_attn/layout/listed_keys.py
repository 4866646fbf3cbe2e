"""Keys that are listed for each query, tokens or blocks of tokens, and the tiles in which they are computed."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.layout.selected_keys import (
    AXIS,
    DOCUMENT,
    ChosenKeys,
    Sizes,
    States,
    Tiles,
    TileWork,
    counted_once,
    in_range,
    own_head,
    ranges,
    single_tiles,
)
from hf_efficient_attn.layout.token_locations import token_locations
from hf_efficient_attn.layout.token_mask import TokenMask

# The tiles of tokens that are listed for each query: consecutive queries with all tokens that any of them attends to.
#
# On CPUs a row of keys costs a tile as much as dozens of scores, and consecutive queries often attend to the same keys.
# The more queries a tile has, the fewer rows there are, but the more of its scores belong to pairs that are not
# selected. Random choices get tiles of hundreds of queries, which attend to nearly all keys; choices that are alike get
# smaller tiles.


# the number of queries of the smallest tile, and how many of these the largest tile holds; if the contents of a choice
# are unknown, about how many tokens the smallest tile has per token of a query; if they are known, in how many
# stretches, each as long as the largest tile, the work is counted
NEIGHBOURS, MOST_NEIGHBOURS, TOKENS_PER_TOKEN, COUNTED_STRETCHES = 64, 8, 5, 2
STRETCH = NEIGHBOURS * MOST_NEIGHBOURS
# limits for the entries of a mask and the rows of keys that are computed together, so that memory is soon reused
MOST_ENTRIES, MOST_KEY_ROWS = 1 << 22, 1 << 16


class Neighbours(NamedTuple):
    """Consecutive queries, and the keys that any of them attends to.

    Attributes:
        first, stop: the range of the queries.
        keys: the keys in ascending order.
        listed: the places in `keys` of the tokens of each query, [queries, k]; len(keys) for none.
    """

    first: int
    stop: int
    keys: Tensor
    listed: Tensor


def token_tiles(tokens: Tensor, layout: Layout, sizes: Sizes) -> Iterator[Tiles]:
    """Yield tiles of queries and the tokens that they attend to; tokens: [batch or 1, heads, queries, k]."""
    if tokens.shape[2] * tokens.shape[3] * sizes.batch_size == 0:
        return
    on_cpu = tokens.device.type == "cpu"
    yield from (_neighbour_tiles if on_cpu else _query_tiles)(tokens, layout, sizes)


def token_work(tokens: Tensor, layout: Layout, sizes: Sizes) -> TileWork:
    """Return about how much the tiles of one example hold; tokens: [batch or 1, heads, queries, k].

    On CPUs this is estimated from some tiles of the first example and head.
    """
    num_queries, num_chosen = tokens.shape[2:]
    num_head_groups = max(tokens.shape[1], sizes.num_key_heads)
    group = layout.num_heads // num_head_groups
    if tokens.device.type != "cpu" or torch.compiler.is_compiling() or not tokens.numel():
        num_read = min(layout.num_keys, TOKENS_PER_TOKEN * num_chosen)
        num_tiles = num_head_groups * -(-layout.num_queries // NEIGHBOURS)
        return TileWork(layout.num_rows * num_read, layout.num_rows, num_tiles * num_read, tokens[0].numel())
    stretches = list(ranges(num_queries, STRETCH))
    # the stretches in the middle of parts of equal length
    middles = {len(stretches) * (2 * part + 1) // (2 * COUNTED_STRETCHES) for part in range(COUNTED_STRETCHES)}
    pairs = keys = counted = 0
    for start, stop in (stretches[middle] for middle in middles):
        for tile in neighbours(tokens[0, 0, start:stop], start, layout.num_keys, group, sizes):
            pairs += (tile.stop - tile.first) * len(tile.keys)
            keys += len(tile.keys)
        counted += stop - start
    times = num_head_groups * num_queries / counted
    return TileWork(round(pairs * group * times), layout.num_rows, round(keys * times), tokens[0].numel())


def neighbours(named: Tensor, first: int, num_keys: int, group: int, sizes: Sizes) -> Iterator[Neighbours]:
    """Yield the tiles of a stretch of queries, in the size that costs least.

    Args:
        named: the tokens of each query, [queries of a stretch, k].
        first: the number of the first query.
        group: the number of heads that share the keys.

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
    """Return the number of queries per tile that costs least for a stretch, and the keys of each tile of that size.

    reads: the keys of each of the smallest tiles, bool [tiles, keys].
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
    """Yield tiles of consecutive queries, with all tokens that any of them attends to."""
    num_choices, num_queries = tokens.shape[1:3]
    num_head_groups = max(num_choices, sizes.num_key_heads)
    group = sizes.num_heads // num_head_groups
    for example in range(sizes.batch_size):
        for choice in range(num_choices):
            own = tokens[example if tokens.shape[0] > 1 else 0, choice]
            first, last = (number * num_head_groups // num_choices for number in (choice, choice + 1))
            for start, stop in ranges(num_queries, STRETCH):
                for tile in neighbours(own[start:stop], start, layout.num_keys, group, sizes):
                    yield from _of_head_groups(tile, example, (first, last), num_head_groups, group, sizes)


def _of_head_groups(
    tile: Neighbours, example: int, head_groups: tuple[int, int], num_head_groups: int, group: int, sizes: Sizes
) -> Iterator[Tiles]:
    """Yield the tiles of consecutive queries for a range of head groups, each of which shares its selected keys."""
    num_queries, num_keys = tile.stop - tile.first, len(tile.keys)
    queries = torch.arange(tile.first, tile.stop).repeat_interleave(group)
    most = max(1, min(MOST_KEY_ROWS // num_keys, sizes.most_pairs // (num_queries * group * num_keys)))
    for low, high in ranges(head_groups[1] - head_groups[0], most):
        head_group = torch.arange(head_groups[0] + low, head_groups[0] + high)
        heads = (head_group[:, None] * group + torch.arange(group)).repeat(1, num_queries)
        first_head, stop_head = (example * sizes.num_heads + (head_groups[0] + each) * group for each in (low, high))
        yield single_tiles(
            torch.full_like(head_group, example),
            heads,
            own_head(head_group, num_head_groups, sizes.num_key_heads),
            queries.expand(len(head_group), -1),
            tile.keys.expand(len(head_group), -1).contiguous(),
            (first_head, stop_head),
            listed=tile.listed,
        )


def _query_tiles(tokens: Tensor, layout: Layout, sizes: Sizes) -> Iterator[Tiles]:
    """Yield tiles of one query, for all heads that share its keys."""
    num_queries, num_chosen = tokens.shape[2:]
    # a tile holds the heads that share both a selection and a key head
    num_head_groups = max(tokens.shape[1], sizes.num_key_heads)
    group = sizes.num_heads // num_head_groups
    tokens = tokens.long()
    places = torch.arange(group, device=tokens.device)
    for first, stop in ranges(
        sizes.batch_size * num_queries, max(1, sizes.most_pairs // (num_chosen * sizes.num_heads))
    ):
        row = torch.arange(first, stop, device=tokens.device)
        example, query = row // num_queries, row % num_queries
        chosen = tokens[example if len(tokens) > 1 else torch.zeros_like(example), :, query]
        chosen = once(chosen, layout.num_keys)
        chosen = chosen.repeat_interleave(num_head_groups // chosen.shape[1], 1).flatten(0, 1)
        head_group = torch.arange(num_head_groups, device=tokens.device).repeat(len(row))
        example, query = (each.repeat_interleave(num_head_groups) for each in (example, query))
        bounds = ((first // num_queries) * sizes.num_heads, ((stop - 1) // num_queries + 1) * sizes.num_heads)
        heads = head_group[:, None] * group + places
        key_heads = own_head(head_group, num_head_groups, sizes.num_key_heads)
        yield single_tiles(example, heads, key_heads, query[:, None].expand(-1, group), chosen, bounds)


def once(numbers: Tensor, count: int) -> Tensor:
    """Return numbers [rows, heads, k] with -1 in place of those that are out of range, and of repetitions in a row.

    >>> once(torch.tensor([[[3, 1, 3, 9]]]), 4).tolist() in ([[[3, 1, -1, -1]]], [[[-1, 1, 3, -1]]])
    True
    """
    inside = torch.where((numbers >= 0) & (numbers < count), numbers, count)
    places = torch.arange(numbers.shape[-1], device=numbers.device).expand_as(numbers)
    # uninitialized, but only entries that were written are read: for each number, one of the places that name it
    stamps = numbers.new_empty(*numbers.shape[:-1], count + 1)
    stamps.scatter_(-1, inside, places)
    return torch.where((stamps.gather(-1, inside) == places) & (inside < count), numbers, -1)


# The tiles of a few queries that attend to blocks, as in decoding: one for each query, with all keys of its blocks.


# up to this many queries of an example seldom attend to the same blocks
FEW_QUERIES = 4


def tiles_of_few(
    blocks: Tensor, starts: Tensor, block_tokens: int, queries_per_choice: int, layout: Layout, sizes: Sizes
) -> Iterator[Tiles]:
    """Yield tiles of one query, for all heads that share its keys; the arguments are those of `block_tiles`."""
    num_queries, width, device = layout.num_queries, blocks.shape[3] * block_tokens, blocks.device
    num_head_groups = max(blocks.shape[1], sizes.num_key_heads)
    group = sizes.num_heads // num_head_groups
    places, offsets = (torch.arange(count, device=device) for count in (group, block_tokens))
    for first, stop in ranges(
        sizes.batch_size * num_head_groups * num_queries, max(1, sizes.most_pairs // (width * group))
    ):
        number = torch.arange(first, stop, device=device)
        head, query = number // num_queries, number % num_queries
        example, head_group = head // num_head_groups, head % num_head_groups
        of_example = example if len(blocks) > 1 else torch.zeros_like(example)
        own = own_head(head_group, num_head_groups, blocks.shape[1])
        chosen = each_once(blocks[of_example, own, query // queries_per_choice].long())
        start = starts[example if len(starts) > 1 else torch.zeros_like(example), query]
        is_block = (chosen >= 0) & (chosen < layout.num_keys)
        keys = start[:, None] + chosen.clamp(0, layout.num_keys) * block_tokens
        keys = (keys[..., None] + offsets).masked_fill(~is_block[..., None], -1).flatten(1)
        yield single_tiles(
            example,
            head_group[:, None] * group + places,
            own_head(head_group, num_head_groups, sizes.num_key_heads),
            query[:, None].expand(-1, group),
            torch.where(keys < layout.num_keys, keys, -1),
            ((first // num_queries) * group, ((stop - 1) // num_queries + 1) * group),
        )


def each_once(numbers: Tensor) -> Tensor:
    """Return numbers [..., k] with -1 in place of repetitions in a row.

    >>> each_once(torch.tensor([3, 1, 3])).tolist()
    [3, 1, -1]
    """
    count = numbers.shape[-1]
    earlier = torch.ones(count, count, dtype=torch.bool, device=numbers.device).tril(-1)
    is_again = ((numbers[..., :, None] == numbers[..., None, :]) & earlier).any(-1)
    return numbers.masked_fill(is_again, -1)


# The tiles of queries that all attend to their own block: consecutive tokens, whose mask is a triangle.


def reads_own_block(
    blocks: Tensor, starts: Tensor, block_tokens: int, queries_per_choice: int, layout: Layout, sizes: Sizes
) -> bool:
    """Return whether the tokens are one sequence without a cache, in which every query has chosen its own block.

    False on other devices than CPUs, and if a block is too long for one tile. The arguments are those of `block_tiles`.
    """
    if block_tokens**2 > sizes.most_pairs:
        return False
    is_whole = not layout.is_cross and layout.query_offset == 0 and layout.num_queries == layout.num_keys
    if blocks.device.type != "cpu" or queries_per_choice > 1 or not is_whole or bool(starts.any()):
        return False
    own = torch.arange(layout.num_queries) // block_tokens
    return bool((blocks == own[:, None]).any(-1).all())


def diagonal_tiles(block_tokens: int, layout: Layout, sizes: Sizes, device: torch.device) -> Iterator[Tiles]:
    """Yield the tiles of all blocks, each with its own keys."""
    num_blocks = -(-layout.num_keys // block_tokens)
    tokens = torch.arange(layout.num_keys, device=device)
    tokens = pad(tokens, (0, num_blocks * block_tokens - layout.num_keys), value=-1)
    most_blocks = max(1, min(num_blocks, sizes.most_pairs // block_tokens**2))
    most_heads = max(1, sizes.most_pairs // (most_blocks * block_tokens**2))
    for first, stop in ranges(sizes.batch_size * sizes.num_heads, most_heads):
        number = torch.arange(first, stop, device=device)
        head = number % sizes.num_heads
        for start, end in ranges(num_blocks, most_blocks):
            own = tokens[start * block_tokens : end * block_tokens].expand(stop - first, -1).contiguous()
            yield Tiles(
                examples=number // sizes.num_heads,
                heads=head[:, None, None],
                key_heads=own_head(head, sizes.num_heads, sizes.num_key_heads),
                queries=own.unflatten(1, (-1, block_tokens)),
                keys=own,
                tile_keys=block_tokens,
                key_step=block_tokens,
                first_head=first,
                stop_head=stop,
                are_diagonal=True,
            )


# The tiles of blocks of keys that are listed for each query: each has many queries and one block.


# returns counts as integers
Counted = Callable[[Tensor], list[int]]
# limits for the number of queries in a tile of one block; tiles are small if few queries attend to a block
MOST_TILE_QUERIES, FEWEST_TILE_QUERIES = 512, 16
# the number of tile sizes, each half of the previous one
TILE_SIZES = 4


def block_tiles(
    blocks: Tensor,
    starts: Tensor,
    block_tokens: int,
    queries_per_choice: int,
    layout: Layout,
    sizes: Sizes,
    masks: Sequence[Tensor | None] = (),
) -> Iterator[Tiles]:
    """Yield tiles of queries that attend to the same block.

    Args:
        blocks: [batch or 1, heads, choices, k].
        starts: the key from which the blocks of each query are counted, [batch or 1, queries].
        masks: the tensors from which `starts` were computed.
    """
    num_queries, num_chosen = layout.num_queries, blocks.shape[3]
    if num_queries * num_chosen * sizes.batch_size == 0:
        return
    if num_queries <= FEW_QUERIES:
        yield from tiles_of_few(blocks, starts, block_tokens, queries_per_choice, layout, sizes)
        return
    if reads_own_block(blocks, starts, block_tokens, queries_per_choice, layout, sizes):
        yield from diagonal_tiles(block_tokens, layout, sizes, blocks.device)
        own = torch.arange(num_queries, device=blocks.device) // block_tokens
        blocks = blocks.masked_fill(blocks == own[:, None], -1)
    num_head_groups = max(blocks.shape[1], sizes.num_key_heads)
    group = sizes.num_heads // num_head_groups
    most_heads = max(1, MOST_LISTED // (num_queries * num_chosen))
    for first, stop in ranges(sizes.batch_size * num_head_groups, most_heads):
        head = torch.arange(first, stop, device=blocks.device)
        entries = _sorted_entries(blocks, starts, block_tokens, queries_per_choice, layout, head, num_head_groups)
        key = (block_tokens, queries_per_choice, layout, sizes, first)
        counted = partial(counted_once, (blocks, *masks), key)
        yield from _of_entries(*entries, block_tokens, layout, sizes, (first, stop), num_head_groups, group, counted)


# entries (query, block) that are sorted together
MOST_LISTED = 1 << 22


def _sorted_entries(
    blocks: Tensor,
    starts: Tensor,
    block_tokens: int,
    queries_per_choice: int,
    layout: Layout,
    head: Tensor,
    num_head_groups: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (codes, queries, counts): the pairs of a query and a block of some heads, in the order of their blocks.

    A code is the first key of a block, plus the number of the head times the number of keys; the last code stands for
    no block. `counts` says how many pairs there are of every code.
    """
    num_keys, num_queries = layout.num_keys, layout.num_queries
    example, head_group = head // num_head_groups, head % num_head_groups
    own = own_head(head_group, num_head_groups, blocks.shape[1])
    chosen = blocks[example if len(blocks) > 1 else torch.zeros_like(example), own].long()
    chosen = each_once(chosen)
    if queries_per_choice > 1:
        chosen = chosen.repeat_interleave(queries_per_choice, 1)[:, :num_queries]
    first = starts[example if len(starts) > 1 else torch.zeros_like(example)][..., None]
    is_block = (chosen >= 0) & (chosen < num_keys)
    keys = first + chosen.clamp(0, num_keys) * block_tokens
    num_codes = len(head) * num_keys
    numbers = torch.arange(len(head), device=head.device)[:, None, None] * num_keys
    codes = torch.where(is_block & (keys < num_keys), numbers + keys, num_codes).flatten()
    queries = torch.arange(num_queries, device=head.device)[:, None].expand_as(chosen).flatten()
    codes, order = codes.sort(stable=True)
    counts = torch.zeros(num_codes + 1, dtype=torch.long, device=head.device)
    return codes, queries[order], counts.scatter_add_(0, codes, torch.ones_like(codes))


def _of_entries(
    codes: Tensor,
    queries: Tensor,
    counts: Tensor,
    block_tokens: int,
    layout: Layout,
    sizes: Sizes,
    bounds: tuple[int, int],
    num_head_groups: int,
    group: int,
    counted: Counted,
) -> Iterator[Tiles]:
    """Yield the tiles of sorted pairs of a query and a block.

    The last queries of a block, which may not fill a tile, are in a smaller one.
    """
    num_heads, num_blocks = bounds[1] - bounds[0], -(-layout.num_keys // block_tokens)
    num_entries = len(codes) if codes.device.type != "cpu" else len(codes) - int(counts[-1])
    mean = num_entries * group // (num_heads * num_blocks)
    per_tile = max(1, min(tile_queries(mean) // group, sizes.most_pairs // (block_tokens * group)))
    offsets = torch.arange(block_tokens, device=codes.device)
    places = torch.arange(group, device=codes.device)
    fewest = -(-FEWEST_TILE_QUERIES // group)
    for table, code_of_tile in _filled_tiles(codes, queries, counts, per_tile, fewest, counted):
        head, first_key = bounds[0] + code_of_tile // layout.num_keys, code_of_tile % layout.num_keys
        width = table.shape[1]
        for start, stop in ranges(len(table), max(1, sizes.most_pairs // (width * group * block_tokens))):
            own, key = head[start:stop], first_key[start:stop, None] + offsets
            head_group = own % num_head_groups
            heads = (head_group[:, None, None] * group + places).expand(-1, width, -1).flatten(1)
            yield single_tiles(
                own // num_head_groups,
                heads,
                own_head(head_group, num_head_groups, sizes.num_key_heads),
                table[start:stop, :, None].expand(-1, -1, group).flatten(1),
                torch.where(key < layout.num_keys, key, -1),
                bounds_of(own, group, bounds),
            )


def _filled_tiles(
    codes: Tensor, queries: Tensor, counts: Tensor, per_tile: int, fewest: int, counted: Counted
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield tiles of equal size, [tiles, queries] with -1 for empty places, and the code of each, in ascending order.

    Every code has tiles of `per_tile` queries, and one tile for the remaining queries, whose size is halved as long as
    they fit and it has at least `fewest` places.
    """
    widths = [per_tile]
    while len(widths) < TILE_SIZES and widths[-1] // 2 >= fewest:
        widths.append(widths[-1] // 2)
    of_codes = counts[:-1]
    whole = of_codes // per_tile
    rest = of_codes - whole * per_tile
    has_rest = [(rest > low) & (rest <= width) for width, low in zip(widths, [*widths[1:], 0], strict=True)]
    numbers = [whole + has_rest[0], *(each.long() for each in has_rest[1:])]
    lasts = [number.cumsum(0) for number in numbers]
    # the host waits for a device here
    totals = counted(torch.stack([last[-1] for last in lasts]))
    # the places, in the table of all tiles, of the first entry of a code and of the first of its remaining entries
    first_entry = of_codes.cumsum(0) - of_codes
    first_place, first_of_rest, base = (lasts[0] - numbers[0]) * per_tile, torch.zeros_like(rest), 0
    for width, last, is_own, total in zip(widths, lasts, has_rest, totals, strict=True):
        first_of_rest = torch.where(is_own, base + (last - 1) * width, first_of_rest)
        base += total * width
    border = first_entry + whole * per_tile
    is_entry, entry = codes < len(of_codes), torch.arange(len(codes), device=codes.device)
    own = codes.clamp(max=len(of_codes) - 1)
    place = entry + torch.where(entry < border[own], (first_place - first_entry)[own], (first_of_rest - border)[own])
    table = torch.full((base + 1,), -1, device=codes.device).scatter_(0, torch.where(is_entry, place, base), queries)
    parts = table[:-1].split([total * width for total, width in zip(totals, widths, strict=True)])
    for width, last, total, part in zip(widths, lasts, totals, parts, strict=True):
        if total:
            tiles = torch.arange(total, device=codes.device)
            yield part.view(total, width), torch.searchsorted(last, tiles, right=True)


def tile_queries(mean: int) -> int:
    """Return the number of queries per tile if `mean` queries attend to a block on average.

    >>> [tile_queries(mean) for mean in (3, 100, 10_000)]
    [16, 64, 512]
    """
    return min(MOST_TILE_QUERIES, max(FEWEST_TILE_QUERIES, 1 << (mean // 2).bit_length()))


def bounds_of(head: Tensor, group: int, bounds: tuple[int, int]) -> tuple[int, int]:
    """Return the range of the query heads of sorted head groups; a wider one if the host would have to wait for it."""
    first, stop = (int(head[0]), int(head[-1]) + 1) if head.device.type == "cpu" else bounds
    return first * group, stop * group


@dataclass(frozen=True, eq=False)
class ChosenTokens(ChosenKeys):
    """The keys selected for each query, as far as the pattern and the masks allow them (DSA, arXiv:2512.02556).

    >>> import torch, hf_efficient_attn as hea
    >>> q, k, v = torch.randn(3, 1, 2, 4, 8)
    >>> tokens = torch.tensor([[[[0, -1], [0, 1], [1, 1], [0, 9]]]])
    >>> out = hea.attention(q, k, v, hea.patterns.Causal(), chosen=hea.ChosenTokens(tokens))
    >>> torch.allclose(out[:, :, 2], v[:, :, 1]) and torch.allclose(out[:, :, 3], v[:, :, 0])
    True

    Attributes:
        tokens: int [B or 1, heads, Nq, k], indices of keys; heads: 1 (all heads share the selection), the number of key
            heads, or that of query heads. -1 and indices out of range select no key; a key listed twice counts once.
    """

    tokens: Tensor
    kind: ClassVar[str] = "tokens"
    shares_masks: ClassVar[bool] = True
    tensor_names: ClassVar[tuple[str, ...]] = ("tokens",)

    def check(self, states: States) -> None:
        """Raise InputError for tensors or numbers that do not fit the call."""
        self.check_tensor("tokens", states, {"queries": states.num_queries, "keys": None})

    def of_query(self, query: int, position: int) -> ChosenKeys:
        """Return the choice for a call with only this query."""
        return replace(self, tokens=self.tokens[:, :, query : query + 1])

    def counts(
        self, layout: Layout, tokens: TokenMask, num_key_heads: int, query_start: Tensor | None = None
    ) -> Tensor:
        """Return 1 for every selected pair, 0 for others."""
        return named_once(self.tokens, layout.num_keys)

    def tiles(self, layout: Layout, tokens: TokenMask, sizes: Sizes, only: Tensor | None = None) -> Iterator[Tiles]:
        """Yield tiles of queries and the tokens that they attend to."""
        return token_tiles(self.tokens, layout, sizes)

    def work(self, layout: Layout, sizes: Sizes) -> TileWork:
        """Return about how much the tiles hold: consecutive queries with all tokens that they attend to."""
        return token_work(self.tokens, layout, sizes)

    def has_single_rows(self, layout: Layout) -> bool:
        """Return True: a tile holds all keys of a query."""
        return True

    def most_pairs(self, layout: Layout, num_key_heads: int) -> int:
        """Return how many pairs can be selected in all heads of one example."""
        return layout.num_rows * self.tokens.shape[3]


@dataclass(frozen=True, eq=False)
class ChosenBlocks(ChosenKeys):
    """The blocks of keys selected for each query or block of queries (MoBA, arXiv:2502.13189; MiniMax-M3).

    Block b holds the keys b · block_tokens … (b + 1) · block_tokens - 1.

    Attributes:
        blocks: int [B or 1, heads, ceil(Nq / queries_per_choice), k], indices of blocks; heads: 1 (all heads share the
            selection), the number of key heads, or that of query heads. -1 and indices out of range select no block; a
            block listed twice counts once.
        block_tokens: how many keys a block has.
        queries_per_choice: how many consecutive queries of the call share a selection.
        counted_from: "document": blocks are counted from the first token of the query's document, so that padding and
            packing change nothing; "axis": from the first key of the call.
    """

    blocks: Tensor
    block_tokens: int
    queries_per_choice: int = 1
    counted_from: str = DOCUMENT
    kind: ClassVar[str] = "blocks"
    has_full_tiles: ClassVar[bool] = True
    are_blocks: ClassVar[bool] = True
    tensor_names: ClassVar[tuple[str, ...]] = ("blocks",)
    number_names: ClassVar[tuple[str, ...]] = ("block_tokens", "queries_per_choice", "counted_from")

    def check(self, states: States) -> None:
        """Raise InputError for tensors or numbers that do not fit the call."""
        self.check_count("block_tokens", 1)
        self.check_count("queries_per_choice", 1)
        self.check_word("counted_from", (DOCUMENT, AXIS))
        num_choices = -(-states.num_queries // self.queries_per_choice)
        self.check_tensor("blocks", states, {"choices": num_choices, "blocks": None})

    def of_query(self, query: int, position: int) -> ChosenKeys:
        """Return the choice for a call with only this query."""
        choice = query // self.queries_per_choice
        return replace(self, blocks=self.blocks[:, :, choice : choice + 1], queries_per_choice=1)

    def counts(
        self, layout: Layout, tokens: TokenMask, num_key_heads: int, query_start: Tensor | None = None
    ) -> Tensor:
        """Return 1 for every selected pair, 0 for others."""
        num_blocks = -(-layout.num_keys // self.block_tokens)
        chosen = named_once(self.blocks, num_blocks)
        if self.queries_per_choice > 1:
            chosen = chosen.repeat_interleave(self.queries_per_choice, 2)[:, :, : layout.num_queries]
        places = self.key_places(layout, tokens)
        batch_size = max(chosen.shape[0], places.shape[0])
        own = (places // self.block_tokens)[:, None, None].expand(batch_size, *chosen.shape[1:3], -1)
        return chosen.expand(batch_size, -1, -1, -1).gather(3, own)

    def tiles(self, layout: Layout, tokens: TokenMask, sizes: Sizes, only: Tensor | None = None) -> Iterator[Tiles]:
        """Yield tiles of queries that attend to the same block."""
        starts = self.starts(layout, tokens)
        masks = () if self.counted_from == AXIS else tokens.tensors
        return block_tiles(self.blocks, starts, self.block_tokens, self.queries_per_choice, layout, sizes, masks)

    def work(self, layout: Layout, sizes: Sizes) -> TileWork:
        """Return how much the tiles hold if the same number of queries attends to each block."""
        num_key_heads = sizes.num_key_heads
        reads = layout.num_rows * self.blocks.shape[3]
        if layout.num_queries <= FEW_QUERIES:
            num_sets = layout.num_queries * max(self.blocks.shape[1], num_key_heads)
            num_read = self.blocks.shape[3] * self.block_tokens
            return TileWork(reads * self.block_tokens, layout.num_rows, num_sets * num_read)
        group = layout.num_heads // max(self.blocks.shape[1], num_key_heads)
        num_blocks = -(-layout.num_keys // self.block_tokens)
        per_tile = tile_queries(reads // layout.num_heads * group // num_blocks)
        num_tiles = reads // per_tile + layout.num_heads // group * num_blocks
        return TileWork(reads * self.block_tokens, num_tiles * per_tile, num_tiles * self.block_tokens)

    def has_single_rows(self, layout: Layout) -> bool:
        """Return whether each query has its own tile."""
        return layout.num_queries <= FEW_QUERIES

    def starts(self, layout: Layout, tokens: TokenMask) -> Tensor:
        """Return the key from which the blocks of each query are counted, int [batch or 1, queries]."""
        device = self.blocks.device
        if self.counted_from == AXIS or (tokens.is_empty and not layout.is_cross):
            return torch.zeros(1, layout.num_queries, dtype=torch.long, device=device)
        positions = token_locations(tokens, layout.num_keys, device).positions
        starts = torch.arange(layout.num_keys, device=device) - positions
        if layout.is_cross:
            # all keys are one document, which begins with the first key that is not masked
            return starts.amax(1, keepdim=True).expand(-1, layout.num_queries)
        return starts[:, layout.queries]

    def key_places(self, layout: Layout, tokens: TokenMask) -> Tensor:
        """Return the number of each key, counted from where blocks are counted, int [batch or 1, keys]."""
        if self.counted_from == AXIS:
            return torch.arange(layout.num_keys, device=self.blocks.device)[None]
        return token_locations(tokens, layout.num_keys, self.blocks.device).positions


def named_once(numbers: Tensor, count: int) -> Tensor:
    """Return 1 for every number from 0 to count - 1 that occurs in a row, otherwise 0, int32 [..., count]."""
    named = torch.zeros(*numbers.shape[:-1], count + 1, dtype=torch.int32, device=numbers.device)
    return named.scatter(-1, in_range(numbers, count), 1)[..., :count]
