"""Layers that compute each head by itself, whatever it reads: processes that share a text deal out their heads."""

from typing import Any

from hf_efficient_attn.attention.sharded.dealt_heads import DealtHeads, deal_heads, refuse_halo
from hf_efficient_attn.attention.sharded.layer import refuse_compiled, refuse_on_shards
from hf_efficient_attn.attention.sharded.sequence_shards import shards_of
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
