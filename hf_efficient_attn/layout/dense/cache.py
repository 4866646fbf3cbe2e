"""What masks over all pairs are kept by."""

from hf_efficient_attn.layout.cache import MEBIBYTE
from hf_efficient_attn.layout.layout import Layout

CACHE_BYTES = 512 * MEBIBYTE


def mask_key(layout: Layout) -> object:
    """Return what the mask of a layout depends on: layers whose patterns are drawn alike share it."""
    return layout.head_groups(), layout.num_heads, layout.num_queries, layout.num_keys, layout.query_offset
