"""The tiles of a few queries that read blocks, as in decoding: one for each query, with all keys of its blocks."""

from collections.abc import Iterator

import torch
from torch import Tensor

from hf_efficient_attn.layout.chosen.tiles import Sizes, Tiles, own_head, ranges, single_tiles
from hf_efficient_attn.layout.layout import Layout

# as many queries of an example, and fewer, seldom read the same blocks
FEW_QUERIES = 4


def tiles_of_few(
    blocks: Tensor, starts: Tensor, block_tokens: int, queries_per_choice: int, layout: Layout, sizes: Sizes
) -> Iterator[Tiles]:
    """Yield tiles of one query of the heads that share its keys; the arguments are those of `block_tiles`."""
    num_queries, width, device = layout.num_queries, blocks.shape[3] * block_tokens, blocks.device
    num_shares = max(blocks.shape[1], sizes.num_key_heads)
    group = sizes.num_heads // num_shares
    places, offsets = (torch.arange(count, device=device) for count in (group, block_tokens))
    for first, stop in ranges(sizes.batch_size * num_shares * num_queries, max(1, sizes.most_pairs // (width * group))):
        number = torch.arange(first, stop, device=device)
        head, query = number // num_queries, number % num_queries
        example, share = head // num_shares, head % num_shares
        of_example = example if len(blocks) > 1 else torch.zeros_like(example)
        own = own_head(share, num_shares, blocks.shape[1])
        chosen = each_once(blocks[of_example, own, query // queries_per_choice].long())
        start = starts[example if len(starts) > 1 else torch.zeros_like(example), query]
        is_block = (chosen >= 0) & (chosen < layout.num_keys)
        keys = start[:, None] + chosen.clamp(0, layout.num_keys) * block_tokens
        keys = (keys[..., None] + offsets).masked_fill(~is_block[..., None], -1).flatten(1)
        yield single_tiles(
            example,
            share[:, None] * group + places,
            own_head(share, num_shares, sizes.num_key_heads),
            query[:, None].expand(-1, group),
            torch.where(keys < layout.num_keys, keys, -1),
            ((first // num_queries) * group, ((stop - 1) // num_queries + 1) * group),
        )


def each_once(numbers: Tensor) -> Tensor:
    """Return numbers [..., k] with -1 instead of those that are named before in their row.

    >>> each_once(torch.tensor([3, 1, 3])).tolist()
    [3, 1, -1]
    """
    count = numbers.shape[-1]
    earlier = torch.ones(count, count, dtype=torch.bool, device=numbers.device).tril(-1)
    is_again = ((numbers[..., :, None] == numbers[..., None, :]) & earlier).any(-1)
    return numbers.masked_fill(is_again, -1)
