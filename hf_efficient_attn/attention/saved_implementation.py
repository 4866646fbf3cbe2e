"""Saved configs say that a model with a pattern or an indexer runs on "efficient".

transformers reads `attn_implementation` from config.json, removes it from the config and never writes it again. Without
it, a model that is saved again (in another dtype, with merged adapters, with more embeddings, ...) would be loaded with
its pattern ignored. What is written is the name of this package, which transformers shows where it is not imported:
`Specified attn_implementation="hf_efficient_attn" is not supported`. Configs read it as "efficient". Where parts of a
model have patterns, its config has the name for these.

Whoever passes `attn_implementation`, be it None as the command lines of TRL do, overrides what is saved. So the name is
written as `experts_implementation`, too, which transformers checks of every model, with experts or without, and which
nobody passes but with experts: where this package is not imported, the model is refused by the same words. Configs read
it as nothing said. Serving engines with code of their own, which ignore both, are told by `saved_architectures`.

Three methods of transformers are replaced, since no other code sees every config that is saved or read.
"""

import functools
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedConfig

from hf_efficient_attn.attention.layer_patterns import NAME
from hf_efficient_attn.attention.saved_architectures import has_own_pattern, write_architectures

# in saved configs
SAVED_IMPLEMENTATION = "attn_implementation"
SAVED_EXPERTS = "experts_implementation"
SAVED_NAME = "hf_efficient_attn"
# beside the name, what else a config says of experts, where transformers looks for names of parts
OWN = "own"
# the properties of configs that read them
PROPERTY = "_attn_implementation"
EXPERTS = "_experts_implementation"
MARK = "_writes_names"


def write_implementations() -> None:
    """Make `to_dict` of all configs write the names with an `attention_pattern`; may be called again."""
    if not getattr(PreTrainedConfig.to_dict, MARK, False):
        PreTrainedConfig.to_dict = with_names(PreTrainedConfig.to_dict)  # type: ignore[method-assign]
        setattr(PreTrainedConfig, PROPERTY, reading_saved_name(getattr(PreTrainedConfig, PROPERTY)))
        setattr(PreTrainedConfig, EXPERTS, reading_experts(getattr(PreTrainedConfig, EXPERTS)))


def with_names(to_dict: Any) -> Any:
    """Return a config's `to_dict` that also writes the implementation, unless another one was asked for, and names."""

    @functools.wraps(to_dict)
    def written(config: PreTrainedConfig) -> dict[str, Any]:
        found: dict[str, Any] = to_dict(config)
        for field in (SAVED_IMPLEMENTATION, SAVED_EXPERTS):
            # of another config, by which this one was updated
            if found.get(field) == SAVED_NAME:
                del found[field]
        implementation = named(config, follows_pattern)
        if implementation:
            found[SAVED_IMPLEMENTATION] = implementation
        experts = named(config, has_own_pattern)
        if experts:
            found[SAVED_EXPERTS] = with_own(experts, own_experts(found.get(SAVED_EXPERTS)))
        write_architectures(config, found)
        return found

    setattr(written, MARK, True)
    return written


def named(config: PreTrainedConfig, is_named: Callable[[PreTrainedConfig], bool]) -> str | dict[str, Any] | None:
    """Return the saved name for a config, or by their names those of its parts, where `is_named`; None: nothing.

    A config gives its parts what it has itself, whatever stands in theirs, unless it has names for them.
    """
    if is_named(config):
        return SAVED_NAME
    parts = {name: getattr(config, name, None) for name in config.sub_configs}
    found = {name: named(part, is_named) for name, part in parts.items() if isinstance(part, PreTrainedConfig)}
    return {name: implementation for name, implementation in found.items() if implementation} or None


def follows_pattern(config: PreTrainedConfig) -> bool:
    """Return whether a config has a pattern, or an indexer, and no attention that follows none."""
    return has_own_pattern(config) and config._attn_implementation in (None, NAME)


def reading_saved_name(implementation: Any) -> property:
    """Return a config's property of its implementation that takes the saved name for "efficient"."""

    def assign(config: PreTrainedConfig, value: Any) -> None:
        implementation.fset(config, value)
        if implementation.fget(config) == SAVED_NAME:
            implementation.fset(config, NAME)

    return property(implementation.fget, assign, doc=implementation.__doc__)


def reading_experts(implementation: Any) -> property:
    """Return a config's property of its experts that takes the saved name for nothing said."""

    def read(config: PreTrainedConfig) -> Any:
        found = implementation.fget(config)
        # of a config that was loaded before this package
        return None if found == SAVED_NAME else found

    def assign(config: PreTrainedConfig, value: Any) -> None:
        implementation.fset(config, own_experts(value))

    return property(read, assign, doc=implementation.__doc__)


def with_own(experts: str | dict[str, Any], own: Any) -> str | dict[str, Any]:
    """Return the names that are saved, and beside them what else the config says.

    >>> with_own("hf_efficient_attn", {}), with_own("hf_efficient_attn", "eager")
    ('hf_efficient_attn', {'': 'hf_efficient_attn', 'own': 'eager'})
    """
    if not own:
        return experts
    return {**(experts if isinstance(experts, dict) else {"": experts}), OWN: own}


def own_experts(value: Any) -> Any:
    """Return what a config says of experts beside the saved name; {} says nothing, and leaves parts as they are.

    >>> own_experts({"": "hf_efficient_attn", "own": "eager"}), own_experts("hf_efficient_attn"), own_experts(None)
    ('eager', {}, None)
    """
    if isinstance(value, dict):
        return value.get(OWN, {name: each for name, each in value.items() if each != SAVED_NAME})
    return {} if value == SAVED_NAME else value
