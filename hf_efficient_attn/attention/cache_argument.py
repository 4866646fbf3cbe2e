"""The argument that holds a cache: `cache` from transformers 5.24 on, `past_key_values` before.

Here it is called `cache`. What is called from outside takes both names, and has that of the installed transformers in
its signature, at which `generate` and other libraries look, and in what it returns.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from transformers import GenerationMixin
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.modeling_outputs import BaseModelOutputWithPast

from hf_efficient_attn.errors import InputError

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
            f"cache and past_key_values are two names of one argument, and two caches are given, of {in_new} and "
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
