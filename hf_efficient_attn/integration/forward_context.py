"""The arguments of a running forward pass, for masks and layers that do not receive them.

Hooks of the model enter a context before its forward pass and leave it afterwards, even if the forward pass fails.
Models within a model enter contexts of their own. Contexts belong to a thread. Layers that are recomputed in a backward
pass have no context.
"""

import functools
import inspect
import weakref
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin
from transformers.cache_utils import Cache
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.modeling_outputs import BaseModelOutputWithPast

from hf_efficient_attn.errors import InputError


@dataclass
class ForwardContext:
    """A running forward pass of a model.

    Attributes:
        model: the model that runs.
        positions: the `position_ids` of the call; None: they were not a tensor.
        is_without: whether the model is known to have been called without positions.
        cache: the cache; None: none was given.
        whole_table: the token table of the whole text, without its kind, if the model has only a part of the text;
            None: it has the whole text.
        has_marked: whether a layer has taken the tokens of `global_attention_mask`.
    """

    # weak references, so that an interrupted program keeps nothing alive
    model: "weakref.ref[Any]"
    positions: "weakref.ref[Tensor] | None" = None
    is_without: bool = False
    cache: "weakref.ref[Cache] | None" = None
    whole_table: Tensor | None = None
    has_marked: bool = False

    def is_of(self, config: Any) -> bool:
        """Return whether this is a forward pass of the model that owns a config; its layers hold the same object."""
        return getattr(self.model(), "config", None) is config


# the contexts of this thread, innermost last
_running: ContextVar[tuple[ForwardContext, ...]] = ContextVar("_running", default=())


def enter(model: Any, positions: Any = None, are_known: bool = False, cache: Any = None) -> None:
    """Enter a forward pass of a model.

    Args:
        positions, cache: the arguments of the call; anything that is not a tensor or a cache is ignored.
        are_known: if False, positions may have been passed as a positional argument that is not known here.
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
    # a compiler that fails while tracing leaves its context behind: those of this model and of deleted ones are dropped
    return tuple(each for each in _running.get() if each.model() is not model and each.model() is not None)


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
    """Make `table` the mask that the model of a config gets in its forward pass: the token table of the whole text."""
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
    """Record that a layer of the running models has taken the tokens of `global_attention_mask`."""
    for context in _running.get():
        context.has_marked = True


def _of(config: Any) -> ForwardContext | None:
    """Return the innermost context of the model of a config; None: there is none, or the code is being compiled."""
    if torch.compiler.is_compiling():
        return None
    return next((each for each in reversed(_running.get()) if each.is_of(config)), None)


def is_computed_again() -> bool:
    """Return whether a backward pass is recomputing a layer, after the forward pass of its model."""
    return torch._C._current_graph_task_id() != -1


# The argument that holds a cache: `cache` since transformers 5.24, `past_key_values` before.
#
# This package calls it `cache`. Public functions accept both names. Their signatures, which `generate` and other
# libraries inspect, and their outputs use the name of the installed transformers.


CACHE_NAME, OLD_CACHE_NAME = "cache", "past_key_values"
CACHE_NAMES = (CACHE_NAME, OLD_CACHE_NAME)
# the name in the installed transformers
CACHE_ARGUMENT = next(name for name in CACHE_NAMES if name in BaseModelOutputWithPast.__dataclass_fields__)


def takes_cache(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with an argument `cache` that may be called with `past_key_values` instead.

    >>> takes_cache(lambda ids, cache=None: cache)([1], past_key_values="a cache")
    'a cache'
    """

    @functools.wraps(function)
    def named(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **(with_cache(kwargs) if OLD_CACHE_NAME in kwargs else kwargs))

    signature = inspect.signature(function)
    parameters = [
        each.replace(name=CACHE_ARGUMENT) if each.name == CACHE_NAME else each for each in signature.parameters.values()
    ]
    named.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return named


def with_cache(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of a call with the cache renamed to `cache`.

    Raises:
        InputError: there are two caches (see `cache_in`).
    """
    cache = cache_in(options)
    return {name: each for name, each in options.items() if name != OLD_CACHE_NAME} | {CACHE_NAME: cache}


def cache_in(options: Mapping[str, Any]) -> Any:
    """Return the cache among the keyword arguments of a call; None: there is none.

    PEFT up to 0.21 passes its prefix under the old name at every step, in addition to the cache of `generate`, which is
    empty before the first step and holds the prefix after it.

    Raises:
        InputError: there are two caches, and neither continues the other.
    """
    new, old = options.get(CACHE_NAME), options.get(OLD_CACHE_NAME)
    if new is None or old is None or new is old:
        return old if new is None else new
    in_new, in_old = (int(each.get_seq_length()) for each in (new, old))
    if in_old == 0 or 0 < in_new <= in_old:
        raise InputError(
            "cache and past_key_values are two names of the same argument, but two different caches are given, with "
            f"{in_new} and {in_old} tokens. Pass only one of them."
        )
    return new if in_new else old


class CacheGeneration:
    """Mixin for models that generate; it must precede `GenerationMixin`.

    PEFT up to 0.21 looks for the cache of virtual tokens under its old name. If it finds none, it inserts the virtual
    tokens before every new token.
    """

    # `wraps` keeps the signature, in which `generate` checks that `inputs_embeds` is accepted
    @functools.wraps(GenerationMixin.prepare_inputs_for_generation)
    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the inputs that transformers prepares, with the cache under its old name."""
        parent: Any = super()
        inputs: dict[str, Any] = parent.prepare_inputs_for_generation(*args, **kwargs)
        return {OLD_CACHE_NAME if name == CACHE_NAME else name: each for name, each in inputs.items()}


def is_paged(cache: Any) -> bool:
    """Return whether a cache is a paged cache, as in continuous batching (`generate_batch`)."""
    return isinstance(cache, PagedAttentionCache)


def append_paged(
    cache: Any, key: Tensor, value: Tensor, layer_idx: int, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Return the keys and values with which to call an attention function of transformers on a paged cache.

    Args:
        key, value: keys and values of the new tokens, [1, H, T, D].
        options: the keyword arguments of the attention function, completed in place. Before transformers 5.24 the
            function itself appends to the cache.
    """
    if CACHE_ARGUMENT == CACHE_NAME:
        appended: tuple[Tensor, Tensor] = cache.update(key, value, layer_idx, kwargs=options)
        return appended
    options[CACHE_NAME] = cache
    return key, value
