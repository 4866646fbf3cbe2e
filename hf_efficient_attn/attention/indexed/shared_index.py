"""Layers with an indexer where processes share texts: each has the keys of the earlier ones, as from a cache.

An indexer chooses the same keys for all heads, among all earlier tokens; so its keys travel with those of attention.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_efficient_attn.attention.indexed.config_field import INDEXER
from hf_efficient_attn.attention.indexed.indexed_layer import STATES
from hf_efficient_attn.attention.indexed.lightning_indexer import DENSE
from hf_efficient_attn.attention.key_tokens import QueryOffset
from hf_efficient_attn.attention.layer_patterns import LayerPattern
from hf_efficient_attn.attention.sharded.dealt_heads import INDEXED, refuse_heads
from hf_efficient_attn.attention.sharded.exchange import exchanged
from hf_efficient_attn.attention.sharded.layer import refuse_compiled
from hf_efficient_attn.attention.sharded.sequence_shards import Bounds, SequenceShards, shard_bounds, shards_of
from hf_efficient_attn.layout.token_mask import TokenMask


def with_earlier_keys(
    module: nn.Module,
    followed: LayerPattern,
    key: Tensor,
    value: Tensor,
    masks: tuple[TokenMask, QueryOffset],
    options: Mapping[str, Any],
) -> tuple[LayerPattern, Tensor, Tensor, tuple[TokenMask, QueryOffset], dict[str, Any]]:
    """Return what a layer follows, its keys and values [B, H, K, D], their masks, and the arguments of attention.

    They are those of all tokens up to the last of this process, if it shares texts and the layer has an indexer that
    scores; otherwise they are returned as they are.

    Args:
        masks: the token mask, of whole texts, and the position of the first query.

    Raises:
        ConfigurationError: the mode that deals out heads.
        UnsupportedBackendError: code that is being compiled.
    """
    field, said = getattr(module.config, INDEXER, None), options.get(STATES)
    if followed.shards is None or field is None or field["stage"] == DENSE or said is None:
        return followed, key, value, masks, dict(options)
    key, value, index_keys = earlier_keys(module, key, value, said.keys, masks[0])
    states = replace(said, keys=index_keys)
    # the queries are the last of these tokens
    masks = masks[0].first(key.shape[2]), None
    return replace(followed, shards=None), key, value, masks, {**options, STATES: states}


def earlier_keys(
    module: Any, key: Tensor, value: Tensor, index_keys: Tensor, tokens: TokenMask
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the keys and values, and those of an indexer, of all tokens up to the last of this process.

    Args:
        key, value, index_keys: of this process's tokens, [B, H, n, D] twice and [B, n, D] → of all, [B, H, K, D] …
        tokens: the mask of whole texts, which says how long they are.

    Raises:
        ConfigurationError: the mode that deals out heads, for all of which an indexer chooses the same keys.
        UnsupportedBackendError: code that is being compiled.
    """
    shards: Any = shards_of(module)
    refuse_compiled()
    refuse_heads(shards.mode, f"{type(module).__name__}, {INDEXED}")
    assert tokens.shape is not None
    bounds = shard_bounds(tokens.shape[1], shards.size)
    states = earlier_rows(torch.cat((key, value), -1), bounds, shards)
    # apart, since they may have another dtype
    of_index = earlier_rows(index_keys[:, None], bounds, shards)
    keys, values = states.split((key.shape[3], value.shape[3]), 3)
    return keys, values, of_index[:, 0]


def earlier_rows(own: Tensor, bounds: Bounds, shards: SequenceShards) -> Tensor:
    """Return the states of all tokens up to the last of this process, given those of its own: [B, H, n, X] → K."""
    rows, rank = own.permute(2, 0, 1, 3), shards.rank
    to_send = [len(rows) * (other > rank) for other in range(shards.size)]
    to_receive = [(stop - first) * (other < rank) for other, (first, stop) in enumerate(bounds)]
    sent = torch.cat([rows[:0], *[rows] * (shards.size - 1 - rank)])
    received = exchanged(sent, to_send, to_receive, shards.group)
    return torch.cat((received, rows)).permute(1, 2, 0, 3)
