"""Saved configs say that a model with a pattern or an indexer runs on "efficient".

transformers reads `attn_implementation` from config.json, removes it from the config and never writes it again. Without
it, a model that is saved again (in another dtype, with merged adapters, with more embeddings, ...) would be loaded with
its pattern ignored. What is written is the name of this package, which transformers shows where it is not imported:
`Specified attn_implementation="hf_efficient_attn" is not supported`. Configs read it as "efficient". Where parts of a
model have patterns, its config has the name for these. Serving engines, which ignore it, are told by
`saved_architectures`. Two methods of transformers are replaced, since no other code sees every config that is saved or
read.
"""

import functools
from typing import Any

from transformers import PreTrainedConfig

from hf_efficient_attn.attention.indexed.config_field import has_indexer
from hf_efficient_attn.attention.layer_patterns import FIELD, NAME
from hf_efficient_attn.attention.saved_architectures import write_architectures

SAVED_IMPLEMENTATION = "attn_implementation"
# in saved configs, and the property of configs that reads it
SAVED_NAME = "hf_efficient_attn"
PROPERTY = "_attn_implementation"
MARK = "_writes_efficient"


def write_implementations() -> None:
    """Make `to_dict` of all configs write the implementation with an `attention_pattern`; may be called again."""
    if not getattr(PreTrainedConfig.to_dict, MARK, False):
        PreTrainedConfig.to_dict = with_implementation(PreTrainedConfig.to_dict)  # type: ignore[method-assign]
        setattr(PreTrainedConfig, PROPERTY, reading_saved_name(getattr(PreTrainedConfig, PROPERTY)))


def with_implementation(to_dict: Any) -> Any:
    """Return a config's `to_dict` that also writes the implementation, unless another one was asked for, and names."""

    @functools.wraps(to_dict)
    def written(config: PreTrainedConfig) -> dict[str, Any]:
        found: dict[str, Any] = to_dict(config)
        implementation = saved_implementation(config)
        if implementation:
            found[SAVED_IMPLEMENTATION] = implementation
        write_architectures(config, found)
        return found

    setattr(written, MARK, True)
    return written


def saved_implementation(config: PreTrainedConfig) -> str | dict[str, Any] | None:
    """Return what a config is saved with, None: nothing; of parts, the names of those that follow a pattern.

    A config gives its parts what it has itself, whatever stands in theirs, unless it has names for them.
    """
    is_ours = getattr(config, FIELD, None) is not None or has_indexer(config)
    if is_ours and config._attn_implementation in (None, NAME):
        return SAVED_NAME
    parts = {name: getattr(config, name, None) for name in config.sub_configs}
    found = {name: saved_implementation(part) for name, part in parts.items() if isinstance(part, PreTrainedConfig)}
    return {name: implementation for name, implementation in found.items() if implementation} or None


def reading_saved_name(implementation: Any) -> property:
    """Return a config's property of its implementation that takes the saved name for "efficient"."""

    def assign(config: PreTrainedConfig, value: Any) -> None:
        implementation.fset(config, value)
        if implementation.fget(config) == SAVED_NAME:
            implementation.fset(config, NAME)

    return property(implementation.fget, assign, doc=implementation.__doc__)
