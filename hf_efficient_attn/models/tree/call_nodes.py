"""What a call says about its nodes: padding, packed documents, and cached tokens."""

from typing import Any

import torch
from torch import Tensor
from transformers.utils.import_utils import is_tracing

from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.layout.transfer import derived
from hf_efficient_attn.models.prologue import PreparedCall
from hf_efficient_attn.models.tree.nodes import NextNodes, WholeTree, next_nodes, tree_of, whole_tree

CLOSED = (
    "This attention_mask closes or opens other pairs than a padding mask does, but the spans of a BP-Transformer pass "
    "on what all of their tokens say. Pass a padding mask [batch, tokens], and position_ids that restart for packed "
    "documents."
)


def nodes_of(config: Any, call: PreparedCall, is_causal: bool) -> WholeTree | NextNodes:
    """Return the nodes of a call, whose mask is no matrix."""
    mask, device = call.masks(config, is_causal)["token_mask"], call.embedded.device
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
