"""The blocks of the score matrix that a kernel computes, as the BlockMask of torch."""

from copy import copy

import torch
from torch.nn.attention.flex_attention import BlockMask

from hf_efficient_attn.backends.flex.mods import MaskMod
from hf_efficient_attn.layout.blocks.table import CACHE_BYTES, Documents, block_table
from hf_efficient_attn.layout.cache import cached
from hf_efficient_attn.layout.layout import Layout

# (queries, keys) per block, in tokens: on CPUs short blocks waste fewer scores and are as fast
BLOCK_SIZES = {"cpu": (32, 64), "cuda": (128, 128)}


def block_mask(layout: Layout, documents: Documents | None, device: torch.device, mask_mod: MaskMod) -> BlockMask:
    """Return the blocks that hold allowed pairs, and what says which pairs of a block are allowed.

    documents: of each example; None: every example is one whole document.
    """
    mask = copy(_blocks(layout, documents, device))
    mask.mask_mod = mask_mod
    return mask


@cached(CACHE_BYTES)
def _blocks(layout: Layout, documents: Documents | None, device: torch.device) -> BlockMask:
    block_size = BLOCK_SIZES[device.type]
    table = block_table(layout, documents, block_size, device)
    return BlockMask.from_kv_blocks(
        table.num_partial,
        table.partial,
        table.num_full,
        table.full,
        BLOCK_SIZE=block_size,
        seq_lengths=(layout.num_queries, layout.num_keys),
        # the transpose serves the backward pass, which CPUs do not have
        compute_q_blocks=device.type != "cpu",
    )
