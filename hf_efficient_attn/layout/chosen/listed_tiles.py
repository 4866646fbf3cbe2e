"""The tiles of blocks of keys that are listed for each query: many queries of one block."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from hf_efficient_attn.layout.chosen.few_queries import FEW_QUERIES, each_once, tiles_of_few
from hf_efficient_attn.layout.chosen.own_blocks import diagonal_tiles, reads_own_block
from hf_efficient_attn.layout.chosen.tile_counts import counted_once
from hf_efficient_attn.layout.chosen.tiles import Sizes, Tiles, own_head, ranges, single_tiles
from hf_efficient_attn.layout.layout import Layout

# returns counts as integers
Counted = Callable[[Tensor], list[int]]
# queries of a tile that reads one block: few where blocks are read by few
MOST_TILE_QUERIES, FEWEST_TILE_QUERIES = 512, 16
# ... and in how many sizes, each the half of another
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
    """Yield tiles of queries that read the same block.

    Args:
        blocks: [batch or 1, heads, choices, k].
        starts: the key from which the blocks of each query are counted, [batch or 1, queries].
        masks: what `starts` follow from, besides the layout.
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
    num_shares = max(blocks.shape[1], sizes.num_key_heads)
    group = sizes.num_heads // num_shares
    most_heads = max(1, MOST_LISTED // (num_queries * num_chosen))
    for first, stop in ranges(sizes.batch_size * num_shares, most_heads):
        head = torch.arange(first, stop, device=blocks.device)
        entries = _sorted_entries(blocks, starts, block_tokens, queries_per_choice, layout, head, num_shares)
        key = (block_tokens, queries_per_choice, layout, sizes, first)
        counted = partial(counted_once, (blocks, *masks), key)
        yield from _of_entries(*entries, block_tokens, layout, sizes, (first, stop), num_shares, group, counted)


# entries (query, block) that are sorted together
MOST_LISTED = 1 << 22


def _sorted_entries(
    blocks: Tensor,
    starts: Tensor,
    block_tokens: int,
    queries_per_choice: int,
    layout: Layout,
    head: Tensor,
    num_shares: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (codes, queries, counts): of some heads the pairs of a query and a block, in the order of their blocks.

    A code is the first key of a block, plus the number of the head times one more than all keys; the last code is of
    no block. `counts` says how many there are of every code.
    """
    num_keys, num_queries = layout.num_keys, layout.num_queries
    example, share = head // num_shares, head % num_shares
    own = own_head(share, num_shares, blocks.shape[1])
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
    num_shares: int,
    group: int,
    counted: Counted,
) -> Iterator[Tiles]:
    """Yield the tiles of sorted pairs of a query and a block.

    The last queries of a block, which do not fill a tile, are in a smaller one.
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
            share = own % num_shares
            heads = (share[:, None, None] * group + places).expand(-1, width, -1).flatten(1)
            yield single_tiles(
                own // num_shares,
                heads,
                own_head(share, num_shares, sizes.num_key_heads),
                table[start:stop, :, None].expand(-1, -1, group).flatten(1),
                torch.where(key < layout.num_keys, key, -1),
                bounds_of(own, group, bounds),
            )


def _filled_tiles(
    codes: Tensor, queries: Tensor, counts: Tensor, per_tile: int, fewest: int, counted: Counted
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield tiles of equal size, [tiles, queries] with -1 for empty places, and the code of each, in ascending order.

    Every code has tiles of `per_tile` queries, and one for the rest of them: of the half, or its half, …, of `fewest`.
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
    # where the first entry of a code, and the first of its rest, lie in the table of all tiles
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
    """Return how many queries the tiles of a block have that so many read in the mean.

    >>> [tile_queries(mean) for mean in (3, 100, 10_000)]
    [16, 64, 512]
    """
    return min(MOST_TILE_QUERIES, max(FEWEST_TILE_QUERIES, 1 << (mean // 2).bit_length()))


def bounds_of(head: Tensor, group: int, bounds: tuple[int, int]) -> tuple[int, int]:
    """Return the range of the query heads of sorted shares, where the host need not wait for it; else a wider one."""
    first, stop = (int(head[0]), int(head[-1]) + 1) if head.device.type == "cpu" else bounds
    return first * group, stop * group
