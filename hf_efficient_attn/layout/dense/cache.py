"""The key under which masks over all pairs are cached."""

from hf_efficient_attn.layout.cache import MEBIBYTE
from hf_efficient_attn.layout.layout import Layout

CACHE_BYTES = 512 * MEBIBYTE


def mask_key(layout: Layout, is_whole: bool = True) -> object:
    """Return everything that the mask of a layout depends on; layers with equal drawn patterns share it.

    is_whole: whether rows are one document each; what is drawn for others, the patterns at this length do not say.
    """
    if not is_whole and layout.is_drawn_by_document:
        return layout
    return layout.head_groups(), layout.num_heads, layout.num_queries, layout.num_keys, layout.query_offset
