"""Layers that do more than read keys by a pattern, and what processes that share a text exchange for them.

Layers that compute each head by itself deal out their heads; those that mix heads get all keys.
"""

from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.attention.sharded.dealt_heads import DealtHeads, deal_heads, refuse_halo
from hf_efficient_attn.attention.sharded.exchange import exchanged
from hf_efficient_attn.attention.sharded.layer import refuse_compiled, refuse_on_shards
from hf_efficient_attn.attention.sharded.sequence_shards import HEADS, shard_bounds, shards_of
from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.layout.token_mask import TokenMask


def deal_layer(module: Any, num_heads: int, tokens: TokenMask, need_weights: bool) -> DealtHeads | None:
    """Return how processes deal out the heads of a layer; None: this one has whole texts.

    Args:
        tokens: the mask of whole texts, which says how long they are.

    Raises:
        ConfigurationError: fewer heads than processes, or the mode that exchanges keys alone.
        UnsupportedBackendError: weights are asked for, or code that is being compiled.
    """
    shards = shards_of(module)
    if shards is None:
        return None
    refuse_compiled()
    refuse_on_shards(False, False, need_weights)
    refuse_halo(shards.mode, f"{type(module).__name__} needs all keys of a head")
    assert tokens.shape is not None
    return deal_heads(shards, num_heads, tokens.shape[1])


def whole_keys(
    module: Any, key: Tensor, value: Tensor, num_tokens: int, need_weights: bool
) -> tuple[Tensor, Tensor, int]:
    """Return the keys and values of a text that processes share, and the position of this process's first token.

    Args:
        key, value: of this process's tokens, [B, H, n, D] → of all, [B, H, N, D].
        num_tokens: of the whole text.

    Raises:
        ConfigurationError: the mode that deals out heads, which the layer mixes.
        UnsupportedBackendError: weights are asked for, or code that is being compiled.
    """
    shards: Any = shards_of(module)
    refuse_compiled()
    refuse_on_shards(False, False, need_weights)
    if shards.mode == HEADS:
        raise ConfigurationError(
            f"mode='heads' cannot deal out the heads of {type(module).__name__}, which mixes them. Use mode='auto'."
        )
    bounds = shard_bounds(num_tokens, shards.size)
    rows = torch.cat((key, value), -1).permute(2, 0, 1, 3)
    lengths = [stop - first for first, stop in bounds]
    received = exchanged(torch.cat([rows] * shards.size), [len(rows)] * shards.size, lengths, shards.group)
    keys, values = received.permute(1, 2, 0, 3).split((key.shape[3], value.shape[3]), 3)
    return keys, values, bounds[shards.rank][0]
