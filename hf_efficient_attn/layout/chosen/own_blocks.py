"""The tiles of queries that all read the block in which they lie: neighbours, whose mask is a triangle."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.layout.chosen.tiles import Sizes, Tiles, own_head, ranges
from hf_efficient_attn.layout.layout import Layout


def reads_own_block(
    blocks: Tensor, starts: Tensor, block_tokens: int, queries_per_choice: int, layout: Layout, sizes: Sizes
) -> bool:
    """Return whether the tokens are one sequence without a cache, in which every query has chosen its own block.

    Only CPUs are asked, and only where a block is not too long for one tile. The arguments are those of `block_tiles`.
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
