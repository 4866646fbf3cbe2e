"""What a call says about its nodes: padding, packed documents, and cached tokens."""

from typing import Any

import torch
from torch import Tensor
from transformers.utils.import_utils import is_tracing

from hf_efficient_attn.attention.layer_attention import readable_keys
from hf_efficient_attn.errors import InputError
from hf_efficient_attn.layout.host_copies import derived
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.models.prologue import PreparedCall
from hf_efficient_attn.models.tree.nodes import NextNodes, WholeTree, next_nodes, tree_of, whole_tree


def nodes_of(config: Any, call: PreparedCall, is_causal: bool) -> WholeTree | NextNodes:
    """Return the nodes of a call.

    Raises:
        InputError: a mask that is a matrix of other pairs than those of real tokens.
    """
    masks, device = call.masks(config, is_causal), call.embedded.device
    mask, matrix = masks["token_mask"], masks["attention_mask"]
    if matrix is not None:
        mask = TokenMask(readable_keys(matrix, call.batch_size))
        check_pairs(matrix, mask.key_mask, is_causal)
    if call.cache is None or is_nothing_cached(call.past_tokens):
        # a static cache has room for later tokens
        of_tokens = (
            None if each is None else derived(lambda own: own[:, : call.tokens], each)
            for each in (mask.key_mask, mask.segment_ids)
        )
        return whole_tree(TokenMask(*of_tokens), call.batch_size, call.tokens, device)
    real = mask.key_mask
    if real is None:
        real = torch.ones(call.batch_size, call.num_keys, dtype=torch.bool, device=device)
    past = call.past_tokens
    # filled there, not copied to it
    past = past.to(device) if isinstance(past, Tensor) else torch.full((), past, device=device)
    return next_nodes(
        tree_of(config, is_causal), config.clip_distance, past, real, call.tokens, mask.key_mask is not None
    )


def is_nothing_cached(past_tokens: int | Tensor) -> bool:
    """Return whether there are no cached tokens; False while compiling, when a tensor has no known value."""
    if isinstance(past_tokens, Tensor) and is_tracing(past_tokens):
        return False
    return int(past_tokens) == 0


def check_pairs(matrix: Tensor, real: Tensor, is_causal: bool) -> None:
    """Raise InputError unless a matrix lets real tokens read all real tokens, in a causal model those up to itself."""
    if torch.compiler.is_compiling() or is_tracing(matrix):
        return
    allowed = matrix if matrix.dtype == torch.bool else matrix == 0
    num_queries, num_keys = matrix.shape[2:]
    expected = real[:, None, None].expand(-1, -1, num_queries, -1)
    if is_causal:
        index = torch.arange(num_keys, device=matrix.device)
        expected = expected & (index <= index[-num_queries:, None])
    queries = real[:, None, -num_queries:, None]
    if bool(((allowed != expected) & queries).any()):
        raise InputError(
            "This attention_mask closes or opens other pairs than a padding mask does, but the spans of a "
            "BP-Transformer pass on what all of their tokens say. Pass a padding mask [batch, tokens], and "
            "position_ids that restart for packed documents."
        )
