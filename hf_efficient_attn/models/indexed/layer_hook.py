"""What happens before the attention of a layer that has an indexer: its states join the arguments, and the cache."""

from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicIndexedLayer, DynamicLayer, StaticIndexedLayer, StaticLayer

from hf_efficient_attn.attention.cache_argument import cache_in
from hf_efficient_attn.attention.indexed.config_field import INDEXER
from hf_efficient_attn.attention.indexed.indexed_layer import LOSSES, STATES
from hf_efficient_attn.attention.indexed.kept_states import keeping
from hf_efficient_attn.attention.indexed.lightning_indexer import DENSE, IndexStates
from hf_efficient_attn.attention.layer_patterns import NAME
from hf_efficient_attn.errors import UnsupportedBackendError
from hf_efficient_attn.messages import shown
from hf_efficient_attn.models.indexed.own_rotary import READS_CHOICE

# cache layers, and those that also keep the keys of an indexer
INDEXED_LAYERS: dict[type, Any] = {DynamicLayer: DynamicIndexedLayer, StaticLayer: StaticIndexedLayer}


def with_index_states(module: Any, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Return the arguments of an attention module with the states of its indexer; a hook before its forward.

    Raises:
        UnsupportedBackendError: the model is on another attention, its cache is of another kind, or its indexers would
            learn, but nothing takes their losses.
    """
    field = getattr(module.config, INDEXER)
    if field["stage"] == DENSE:
        return None
    if module.config._attn_implementation not in getattr(module, READS_CHOICE, (NAME,)):
        raise UnsupportedBackendError(
            f"{type(module).__name__} has an indexer, but its attn_implementation is "
            f"{shown(module.config._attn_implementation)}, which would read all keys. Call "
            f'model.set_attn_implementation("{NAME}"), or hea.index_stage(model, "dense").'
        )
    hidden_states = options["hidden_states"] if "hidden_states" in options else inputs[0]
    with keeping(field["stage"]):
        queries, keys, weights = module.indexer(hidden_states, *options["position_embeddings"])
    if module.training and queries.requires_grad and LOSSES not in options:
        raise UnsupportedBackendError(
            f"{type(module).__name__} has an indexer (hea.index), whose loss would be lost: its model computes without "
            "the forward that adds it, or its layers do not pass keyword arguments on. Call the model itself, leave "
            'out what replaces its forward or its layers, or call hea.index_stage(model, "dense").'
        )
    cache = cache_in(options)
    if cache is not None:
        keys = indexed_layer_of(cache, module.layer_idx).update_indexer(keys)
    return inputs, {**options, STATES: IndexStates(queries, keys, weights, field["top_k"], field["stage"])}


def indexed_layer_of(cache: Any, layer: int) -> Any:
    """Return the layer of a cache, which from now on also keeps the keys of an indexer.

    Raises:
        UnsupportedBackendError: it cannot.
    """
    # as the cache does when it gets the layer's first keys
    while len(cache.layers) <= layer and cache.layer_class_to_replicate is not None:
        cache.layers.append(cache.layer_class_to_replicate())
    found = cache.layers[layer]
    if hasattr(found, "update_indexer"):
        return found
    kind = INDEXED_LAYERS.get(type(found))
    if kind is None:
        raise UnsupportedBackendError(
            f"The cache has a {type(found).__name__}, which does not keep the keys of an indexer. Generate with the "
            'default cache, or with cache_implementation="static".'
        )
    replaced = kind(max_cache_len=getattr(found, "max_cache_len", None))
    replaced.__dict__.update(found.__dict__)
    cache.layers[layer] = replaced
    return replaced


def rotated_dims(rotary: Any, states: Tensor, position_ids: Tensor) -> int | None:
    """Return how many dimensions a model rotates, in pairs that are half of these apart; None: in other pairs."""
    cos = rotary(states, position_ids)[0]
    first, second = cos.chunk(2, -1)
    return int(cos.shape[-1]) if bool((first == second).all()) else None
