"""Models that use masks themselves, and would compute with a token table as numbers: they are refused before."""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from hf_efficient_attn.attention import requested_table
from hf_efficient_attn.attention.trial import base_class, takes_tables

# configs whose models were tried; configs have no hash
_tried: WeakIdKeyDictionary = WeakIdKeyDictionary()


@functools.wraps(requested_table.requested_table)
def efficient_mask(*args: Any, **kwargs: Any) -> Tensor:
    """Return the token table of a mask that a model asks for (`token_table`), after a trial of that kind of model.

    Raises:
        UnsupportedBackendError: the model uses masks itself.
    """
    config = kwargs.get("config")
    # a trial must not become part of a traced graph
    if config is not None and not torch.compiler.is_compiling() and not torch.jit.is_tracing():
        refuse_mask_user(config)
    return requested_table.requested_table(*args, **kwargs)


def refuse_mask_user(config: Any) -> None:
    """Raise UnsupportedBackendError if the base model of a config uses masks itself; tried once per config."""
    if config in _tried:
        return
    model_class = base_class(config)
    if model_class is not None and not getattr(config, "follows_patterns", False):
        takes_tables(model_class, config)
    mark_tried(config)


def mark_tried(config: Any) -> None:
    """Note that the models of a config do not use masks themselves, or that no trial can tell."""
    _tried[config] = True


def copies_of(config: Any, model: Any) -> list[Any]:
    """Return a config and the copies of it in the modules of a model: encoder-decoders such as T5 have one a part."""
    found = (getattr(module, "config", None) for module in model.modules())
    return [*{id(each): each for each in found if type(each) is type(config)}.values()]
