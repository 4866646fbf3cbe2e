"""Models that are built with a config that has indexers get them before their weights are loaded."""

import functools
from typing import Any

from transformers import PreTrainedModel

from hf_efficient_attn.attention.indexed.config_field import INDEXER, has_indexer
from hf_efficient_attn.models.indexed.index_model import add_indexers, index_stage
from hf_efficient_attn.models.indexed.shard_units import name_units

MARK = "_adds_indexers"


def build_indexers() -> None:
    """Have transformers add indexers to models whose configs have them; may be called again.

    Two methods are replaced: that which every model calls once its modules exist, since nothing else lies between these
    and the loading of weights, and that which loads them, since it thaws all.
    """
    model_class: Any = PreTrainedModel
    if not getattr(model_class.post_init, MARK, False):
        model_class.post_init = with_indexers(model_class.post_init)
        model_class.from_pretrained = classmethod(with_stage(model_class.from_pretrained.__func__))


def with_indexers(post_init: Any) -> Any:
    """Return the method of models, extended to add their indexers first, which it then initializes like the rest."""

    @functools.wraps(post_init)
    def adding(model: Any, *args: Any, **kwargs: Any) -> Any:
        if is_indexed(model):
            add_indexers(model)
        result = post_init(model, *args, **kwargs)
        if is_indexed(model):
            # post_init names all others
            name_units(model)
        freeze(model)
        return result

    setattr(adding, MARK, True)
    return adding


def with_stage(from_pretrained: Any) -> Any:
    """Return the function of a class of models that loads them, extended to freeze what does not learn."""

    @functools.wraps(from_pretrained)
    def loading(model_class: Any, *args: Any, **kwargs: Any) -> Any:
        result = from_pretrained(model_class, *args, **kwargs)
        # with output_loading_info it is a pair
        freeze(result[0] if isinstance(result, tuple) else result)
        return result

    return loading


def freeze(model: Any) -> None:
    """Freeze what does not learn in the stage of a model with indexers."""
    if is_indexed(model):
        index_stage(model, getattr(model.config, INDEXER)["stage"])


def is_indexed(model: Any) -> bool:
    """Return whether a model has indexers, or should."""
    return has_indexer(getattr(model, "config", None)) and hasattr(model.base_model, "layers")
