"""The rotary positions that indexers use in models of our families, and checks that a model can have indexers."""

from typing import Any

from hf_efficient_attn.errors import UnsupportedBackendError
from hf_efficient_attn.messages import shown

# the attribute of attention modules that lists the attention implementations in which they use the keys that an indexer
# selects
READS_CHOICE = "index_implementations"
# config fields with which a layer does not attend to exactly all earlier tokens
OTHER_READING = ("span", "global_tokens")


def own_rotary(model: Any) -> Any:
    """Return the rotary module of a model of our families, which computes cosines and sines for all layers.

    Raises:
        UnsupportedBackendError: the layers of the model cannot have indexers.
    """
    base, config, name = model.base_model, model.config, type(model).__name__
    # a subclass of such a class may compute its attention in another way
    kinds = {type(getattr(layer, "self_attn", None)) for layer in getattr(base, "layers", ())}
    if not kinds or not all(READS_CHOICE in vars(kind) for kind in kinds):
        raise UnsupportedBackendError(
            f"The layers of {name} select keys by their own mechanism, which an indexer cannot replace. Of the "
            "families of this package, index takes SparseTransformer and SimplifiedTransformer."
        )
    if not config.is_causal:
        raise UnsupportedBackendError(
            f"{name} has is_causal=False, but an indexer scores only the keys before a query. Build it with "
            "is_causal=True."
        )
    for field in OTHER_READING:
        if getattr(config, field, None) is not None:
            raise UnsupportedBackendError(
                f"{name} has {field}={shown(getattr(config, field))}, but index needs layers that attend to all "
                f"earlier tokens. Build it with {field}=None."
            )
    kind = config.position_embedding_type
    if kind != "rope":
        raise UnsupportedBackendError(
            f"{name} has position_embedding_type={shown(kind)}, but an indexer rotates its keys by rotary positions. "
            'Build it with position_embedding_type="rope".'
        )
    rotary = next(each.rotary for each in base.modules() if hasattr(each, "rotary"))
    if rotary is None:
        raise UnsupportedBackendError(
            f"{name} has rope_theta_per_layer, so each layer rotates its keys differently, but indexers need one "
            "rotation for all layers. Give rope_parameters instead."
        )
    return rotary
