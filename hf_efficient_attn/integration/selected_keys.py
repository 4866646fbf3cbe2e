"""The keys that a model of transformers has selected itself, and blocks selected by the means in a cache.

DeepSeek-V3.2, GLM-MoE-DSA and similar models pass `indices` of tokens (DSA), and MiniMax-M3 passes `block_indices`. For
"eager" and "sdpa" they convert these to a mask over all pairs, which saves no work.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_efficient_attn.attention.build_call import LayerPattern
from hf_efficient_attn.errors import UnsupportedBackendError
from hf_efficient_attn.integration.cache_layers import BlockLayer
from hf_efficient_attn.integration.forward_context import given_cache
from hf_efficient_attn.layout.listed_keys import ChosenBlocks, ChosenTokens
from hf_efficient_attn.layout.selected_keys import AXIS, ChosenKeys
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.layout.top_k import blocks_by_means
from hf_efficient_attn.layout.transfer import on_host
from hf_efficient_attn.patterns.bands import Causal, Full

# types of layers whose indexer needs a mask over all pairs; the last two are names in older versions of transformers
INDEXED = {"indexed_attention", "deepseek_sparse_attention", "qwen_sparse_attention"}
# a value of an additive mask that is not above this closes its pair
CLOSED = -1e4


def is_indexed(config: Any) -> bool:
    """Return whether a model has layers whose indexer needs a mask over all pairs."""
    return not INDEXED.isdisjoint(getattr(config, "layer_types", None) or ())


def given_selected_keys(
    module: nn.Module, layer_spec: LayerPattern, options: Mapping[str, Any], matrix: Tensor | None, tokens: TokenMask
) -> tuple[LayerPattern, ChosenKeys | None, Tensor | None]:
    """Return what a layer follows by position, the keys that it has selected, and the mask matrix still to apply.

    Args:
        options: keyword arguments of the attention call: `indices`, int [batch, queries, k], or `block_indices`, int
            [batch, key heads, queries, k]. If there is neither, `layer_spec` and `matrix` are returned unchanged.
        tokens: which keys are padding.
        matrix: [batch or 1, 1, queries, keys], True or 0 for open pairs. Indices of closed pairs are dropped.

    Raises:
        UnsupportedBackendError: blocks of unknown length, or counted from padding.
    """
    indices, blocks = options.get("indices"), options.get("block_indices")
    if indices is not None:
        if matrix is None:
            return layer_spec, ChosenTokens(indices[:, None]), None
        # the matrix closes only pairs that were not selected, and those whose indices are dropped here
        return (
            replace(layer_spec, pattern=Full(), attends_to_all=False),
            ChosenTokens(open_indices(indices, matrix)),
            None,
        )
    if blocks is None:
        return layer_spec, None, matrix
    block_tokens = getattr(module.config, "index_block_size", None)
    if not isinstance(block_tokens, int):
        raise UnsupportedBackendError(
            f"{type(module).__name__} selects blocks of keys (block_indices), but its config has no index_block_size, "
            'the length of a block in tokens. Load it with attn_implementation="eager".'
        )
    refuse_other_starts(module, tokens)
    return layer_spec, ChosenBlocks(blocks, block_tokens, counted_from=AXIS), matrix


def refuse_other_starts(module: nn.Module, tokens: TokenMask) -> None:
    """Raise UnsupportedBackendError if texts do not begin at the first slot, from which the model counts blocks."""
    if torch.compiler.is_compiling():
        return
    known = None if tokens.key_mask is None else on_host(tokens.key_mask)
    if tokens.segment_ids is not None:
        ids = on_host(tokens.segment_ids)
        begins = ids[:, 1:] != ids[:, :-1]
        if bool((begins if known is None else begins & known[:, 1:] & known[:, :-1]).any()):
            raise UnsupportedBackendError(
                f"{type(module).__name__} counts blocks of keys from the first slot of a row, also in later documents "
                "of a packed row, so packing would change the selected blocks. Put each document into its own row."
            )
    if known is not None and bool((~known[:, :-1] & known[:, 1:]).any()):
        raise UnsupportedBackendError(
            f"{type(module).__name__} counts blocks of keys from the first slot and may select blocks of padding, so "
            "padding on the left changes the selected keys, also in transformers' own code. Pad on the right "
            "(tokenizer.padding_side = 'right'), or pass texts of one length."
        )


def open_indices(indices: Tensor, matrix: Tensor) -> Tensor:
    """Return the indices, [batch, 1, queries, k], with -1 for closed pairs.

    >>> matrix = torch.tensor([[True, False, False], [True, True, False]])[None, None]
    >>> open_indices(torch.tensor([[[0, 2], [1, 0]]]), matrix).tolist()
    [[[[0, -1], [1, 0]]]]
    """
    is_open = matrix if matrix.dtype == torch.bool else matrix > CLOSED
    of_queries = is_open[:, :1].expand(len(indices), -1, -1, -1)
    listed = indices[:, None].long()
    return torch.where(of_queries.gather(3, listed), listed, -1)


# The selection of blocks by the means in a cache, so that a decoding step does not average all keys.


def cached_selected_keys(
    module: nn.Module,
    layer_spec: LayerPattern,
    query: Tensor,
    key: Tensor,
    tokens: TokenMask,
    query_offset: int | Tensor | None,
) -> tuple[LayerPattern, ChosenKeys | None]:
    """Return what a layer follows by position and the blocks that it selects, if its cache holds their means.

    Otherwise return (layer_spec, None); `with_selected_keys` then computes the means.
    """
    pattern: Any = layer_spec.pattern
    if torch.compiler.is_compiling() or not getattr(pattern, "chooses_by_content", False):
        return layer_spec, None
    layer = layer_of(module, key)
    is_short = key.shape[2] <= pattern.attends_to_all_up_to()
    if layer is None or layer.block_tokens != pattern.block_tokens or is_short or query_offset is not None:
        return layer_spec, None
    others = (tokens.segment_ids, tokens.global_mask, tokens.query_mask, tokens.query_segment_ids)
    # the means in the cache are right only if it knows the padding
    knows_padding = (tokens.key_mask is None) == (layer.padding.num_tokens is None)
    if layer_spec.is_cross or any(each is not None for each in others) or not knows_padding:
        return layer_spec, None
    means = layer.means()
    own = own_blocks(layer, query.shape[2], key.shape[2])
    documents = torch.zeros_like(own)
    numbers = torch.arange(means.shape[2], device=means.device)[None]
    blocks = blocks_by_means(
        query.detach(), means, own, documents, numbers, torch.zeros_like(numbers), pattern.num_chosen
    )
    return replace(layer_spec, pattern=Causal()), ChosenBlocks(blocks, pattern.block_tokens)


def layer_of(module: nn.Module, key: Tensor) -> BlockLayer | None:
    """Return the layer of the cache that holds these keys; None: no `BlockLayer` does."""
    number = getattr(module, "layer_idx", None)
    layers: Any = getattr(given_cache(getattr(module, "config", None)), "layers", ())
    if number is None or number >= len(layers) or not isinstance(layers[number], BlockLayer):
        return None
    return layers[number] if layers[number].keys is key else None


def own_blocks(layer: BlockLayer, num_queries: int, num_keys: int) -> Tensor:
    """Return the block number of each of the last tokens, int [batch or 1, queries]; -1 for padding."""
    positions = layer.positions(torch.arange(num_keys - num_queries, num_keys, device=layer.keys.device))
    return torch.where(positions < 0, -1, positions // layer.block_tokens)
