"""What a sparsified model was called with, for its masks and layers, which get less; known while its forward runs.

Hooks of the model enter a context before its forward pass and leave it afterwards, also if that fails. Models within a
model enter contexts of their own. Every thread has its own, as have layers that a backward pass computes again: none.
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


# The argument that holds a cache: `cache` from transformers 5.24 on, `past_key_values` before.
#
# Here it is called `cache`. What is called from outside takes both names, and has that of the installed transformers
# in its signature, at which `generate` and other libraries look, and in what it returns.


CACHE_NAME, OLD_CACHE_NAME = "cache", "past_key_values"
CACHE_NAMES = (CACHE_NAME, OLD_CACHE_NAME)
# what the installed transformers calls it
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
    """Return the keyword arguments of a call, in which the cache is called `cache`.

    Raises:
        InputError: two caches.
    """
    cache = cache_in(options)
    return {name: each for name, each in options.items() if name != OLD_CACHE_NAME} | {CACHE_NAME: cache}


def cache_in(options: Mapping[str, Any]) -> Any:
    """Return the cache among the keyword arguments of a call; None: there is none.

    PEFT up to 0.21 passes its prefix at every step under the old name, beside the cache of `generate`: that is empty
    before the first step, and holds the prefix after it.

    Raises:
        InputError: two of them, neither of which continues the other.
    """
    new, old = options.get(CACHE_NAME), options.get(OLD_CACHE_NAME)
    if new is None or old is None or new is old:
        return old if new is None else new
    in_new, in_old = (int(each.get_seq_length()) for each in (new, old))
    if in_old == 0 or 0 < in_new <= in_old:
        raise InputError(
            f"cache and past_key_values are two names of one argument, but two caches are given, with {in_new} and "
            f"{in_old} tokens. Pass one of them."
        )
    return new if in_new else old


class CacheGeneration:
    """Mixin of heads that generate, before `GenerationMixin`.

    PEFT up to 0.21 looks for the cache of virtual tokens under its old name, and would put them before every new token
    where it finds none.
    """

    # `generate` reads in the signature that it may be called with `inputs_embeds`
    @functools.wraps(GenerationMixin.prepare_inputs_for_generation)
    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As transformers', with the cache under its old name."""
        parent: Any = super()
        inputs: dict[str, Any] = parent.prepare_inputs_for_generation(*args, **kwargs)
        return {OLD_CACHE_NAME if name == CACHE_NAME else name: each for name, each in inputs.items()}


def is_paged(cache: Any) -> bool:
    """Return whether a cache is that of continuous batching (`generate_batch`)."""
    return isinstance(cache, PagedAttentionCache)


def append_paged(
    cache: Any, key: Tensor, value: Tensor, layer_idx: int, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Return the keys and values that an attention function of transformers is called with, given a paged cache.

    Args:
        key, value: those of the new tokens, [1, H, T, D].
        options: the keyword arguments of that function, which are completed. Before transformers 5.24 it appends to the
            cache by itself.
    """
    if CACHE_ARGUMENT == CACHE_NAME:
        appended: tuple[Tensor, Tensor] = cache.update(key, value, layer_idx, kwargs=options)
        return appended
    options[CACHE_NAME] = cache
    return key, value
