"""What processes that share a text exchange for a layer with an indexer: the keys of all earlier tokens."""

from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.attention.sharded.dealt_heads import refuse_heads
from hf_efficient_attn.attention.sharded.exchange import exchanged
from hf_efficient_attn.attention.sharded.layer import refuse_compiled
from hf_efficient_attn.attention.sharded.sequence_shards import Bounds, SequenceShards, shard_bounds, shards_of
from hf_efficient_attn.layout.token_mask import TokenMask

# why the heads of a layer with an indexer are not dealt out
INDEXED = "for all of which an indexer (hea.index) chooses the same keys"


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
