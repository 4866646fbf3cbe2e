"""Layers with an indexer where processes share texts: each has the keys of the earlier ones, as from a cache.

An indexer chooses the same keys for all heads, among all earlier tokens; so its keys travel with those of attention.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from hf_efficient_attn.attention.indexed.config_field import INDEXER
from hf_efficient_attn.attention.indexed.indexed_layer import STATES
from hf_efficient_attn.attention.indexed.lightning_indexer import DENSE
from hf_efficient_attn.attention.key_tokens import QueryOffset
from hf_efficient_attn.attention.layer_patterns import LayerPattern
from hf_efficient_attn.attention.sharded.mechanisms import earlier_keys
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
