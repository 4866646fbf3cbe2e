"""The choice of blocks by the means that a cache keeps, so that decoding need not read all keys for it."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_efficient_attn.attention.block_cache_layer import BlockLayer
from hf_efficient_attn.attention.forward_context import given_cache
from hf_efficient_attn.attention.layer_patterns import LayerPattern
from hf_efficient_attn.layout.listed_keys import ChosenBlocks
from hf_efficient_attn.layout.selected_keys import ChosenKeys
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.layout.top_k import chosen_by_means
from hf_efficient_attn.patterns.bands import Causal


def cached_choice(
    module: nn.Module,
    followed: LayerPattern,
    query: Tensor,
    key: Tensor,
    tokens: TokenMask,
    query_offset: int | Tensor | None,
) -> tuple[LayerPattern, ChosenKeys | None]:
    """Return what a layer follows by position and the blocks that are chosen, if its cache knows their means.

    Otherwise (what it was given, None); `with_choice` then computes the means.
    """
    pattern: Any = followed.pattern
    if torch.compiler.is_compiling() or not getattr(pattern, "chooses_by_content", False):
        return followed, None
    layer = layer_of(module, key)
    is_short = key.shape[2] <= pattern.reads_all_up_to()
    if layer is None or layer.block_tokens != pattern.block_tokens or is_short or query_offset is not None:
        return followed, None
    others = (tokens.segment_ids, tokens.global_mask, tokens.query_mask, tokens.query_segment_ids)
    # of a mask that the cache has not been told, it knows no means
    is_told = (tokens.key_mask is None) == (layer.padding.num_tokens is None)
    if followed.is_cross or any(each is not None for each in others) or not is_told:
        return followed, None
    means = layer.means()
    own = own_blocks(layer, query.shape[2], key.shape[2])
    documents = torch.zeros_like(own)
    numbers = torch.arange(means.shape[2], device=means.device)[None]
    blocks = chosen_by_means(
        query.detach(), means, own, documents, numbers, torch.zeros_like(numbers), pattern.num_chosen
    )
    return replace(followed, pattern=Causal()), ChosenBlocks(blocks, pattern.block_tokens)


def layer_of(module: nn.Module, key: Tensor) -> BlockLayer | None:
    """Return the layer of the cache that holds these keys; None: there is none that sums them."""
    number = getattr(module, "layer_idx", None)
    layers: Any = getattr(given_cache(getattr(module, "config", None)), "layers", ())
    if number is None or number >= len(layers) or not isinstance(layers[number], BlockLayer):
        return None
    return layers[number] if layers[number].keys is key else None


def own_blocks(layer: BlockLayer, num_queries: int, num_keys: int) -> Tensor:
    """Return the number of the block of each of the last tokens, int [batch or 1, queries]; -1 of padding."""
    positions = layer.positions(torch.arange(num_keys - num_queries, num_keys, device=layer.keys.device))
    return torch.where(positions < 0, -1, positions // layer.block_tokens)
