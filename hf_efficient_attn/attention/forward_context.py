"""What a sparsified model was called with, for its masks and layers, which get less; known while its forward runs.

Hooks of the model enter a context before its forward pass and leave it afterwards, also if that fails. Models within a
model enter contexts of their own. Every thread has its own, as have layers that a backward pass computes again: none.
"""

import weakref
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache


@dataclass
class ForwardContext:
    """A running forward pass of a model.

    Attributes:
        model: whose it is.
        positions: the `position_ids` of the call; None: they were no tensor.
        is_without: whether the model is known to have been called without positions.
        cache: the cache; None: none was given.
        whole_table: the token table, without its kind, of a text of which the model has a part only; None: it has all.
        has_marked: whether a layer has taken the tokens of `global_attention_mask`.
    """

    # not longer than their owners keep them: an interrupted program leaves nothing
    model: "weakref.ref[Any]"
    positions: "weakref.ref[Tensor] | None" = None
    is_without: bool = False
    cache: "weakref.ref[Cache] | None" = None
    whole_table: Tensor | None = None
    has_marked: bool = False

    def is_of(self, config: Any) -> bool:
        """Return whether this is a forward pass of the model of a config, which it shares with its layers."""
        return getattr(self.model(), "config", None) is config


# those of this thread, the innermost last
_running: ContextVar[tuple[ForwardContext, ...]] = ContextVar("_running", default=())


def enter(model: Any, positions: Any = None, are_known: bool = False, cache: Any = None) -> None:
    """Enter a forward pass of a model.

    Args:
        positions, cache: of the call, among other things that may be passed as these.
        are_known: if False, other positions may have been passed as a positional argument.
    """
    context = ForwardContext(
        weakref.ref(model),
        weakref.ref(positions) if isinstance(positions, Tensor) else None,
        positions is None and are_known,
        weakref.ref(cache) if isinstance(cache, Cache) else None,
    )
    _running.set((*_others(model), context))


def leave(model: Any) -> ForwardContext | None:
    """Leave the forward pass of a model, and return its context; None: it was not entered."""
    left = next((each for each in _running.get() if each.model() is model), None)
    _running.set(_others(model))
    return left


def _others(model: Any) -> tuple[ForwardContext, ...]:
    # a compiler that fails while tracing does not leave
    return tuple(each for each in _running.get() if each.model() is not model)


def given_positions(config: Any) -> Tensor | None:
    """Return the positions with which the model of a config was called; None: none, or unknown."""
    context = _of(config)
    return None if context is None or context.positions is None else context.positions()


def given_cache(config: Any) -> Cache | None:
    """Return the cache with which the model of a config was called; None: none, or unknown."""
    context = _of(config)
    return None if context is None or context.cache is None else context.cache()


def was_called_without(config: Any) -> bool:
    """Return whether the model of a config is known to have been called without positions."""
    context = _of(config)
    return context is not None and context.is_without


def set_whole_table(config: Any, table: Tensor | None) -> None:
    """Let masks that the model of a config asks for in its forward pass be the token table of its whole text."""
    context = _of(config)
    if context is not None:
        context.whole_table = table


def whole_table(config: Any) -> Tensor | None:
    """Return the token table of the whole text, without its kind; None: the model has the whole text."""
    if torch.compiler.is_compiling():
        return None
    tables = (each.whole_table for each in _running.get() if each.is_of(config))
    return next((table for table in tables if table is not None), None)


def note_marked(_: Any) -> None:
    """Note that a layer of the running models has taken the tokens of `global_attention_mask`."""
    for context in _running.get():
        context.has_marked = True


def _of(config: Any) -> ForwardContext | None:
    """Return the innermost forward pass of the model of a config; None: none is running, or it is compiled."""
    if torch.compiler.is_compiling():
        return None
    return next((each for each in reversed(_running.get()) if each.is_of(config)), None)


def is_computed_again() -> bool:
    """Return whether a backward pass is recomputing a layer, after the forward pass of its model."""
    return torch._C._current_graph_task_id() != -1
