"""Saved configs say that a model with a pattern runs on "efficient".

transformers reads `attn_implementation` from config.json, removes it from the config and never writes it again. Without
it, a model that is saved again (in another dtype, with merged adapters, with more embeddings, ...) would be loaded with
its pattern ignored. A method of transformers is replaced, since no other code sees every config that is saved.
"""

import functools
from typing import Any

from transformers import PreTrainedConfig

from hf_efficient_attn.attention.layer_patterns import FIELD, NAME

SAVED_IMPLEMENTATION = "attn_implementation"
MARK = "_writes_efficient"


def write_implementations() -> None:
    """Make `to_dict` of all configs write "efficient" with an `attention_pattern`; may be called again."""
    if not getattr(PreTrainedConfig.to_dict, MARK, False):
        PreTrainedConfig.to_dict = with_implementation(PreTrainedConfig.to_dict)  # type: ignore[method-assign]


def with_implementation(to_dict: Any) -> Any:
    """Return a config's `to_dict` that also writes the implementation, unless another one was asked for."""

    @functools.wraps(to_dict)
    def written(config: PreTrainedConfig) -> dict[str, Any]:
        found: dict[str, Any] = to_dict(config)
        if found.get(FIELD) is not None and config._attn_implementation in (None, NAME):
            found[SAVED_IMPLEMENTATION] = NAME
        return found

    setattr(written, MARK, True)
    return written
