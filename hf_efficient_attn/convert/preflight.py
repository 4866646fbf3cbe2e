"""Translate the configs of a conversion, and refuse impossible requests, before any weights are loaded."""

from dataclasses import dataclass, replace
from typing import Any

from hf_efficient_attn.convert.configs import (
    ConversionRequest,
    TheirConfig,
    apply_request,
    check_lengths,
    check_memory,
    keeps_pattern,
    note_replaced,
    our_config,
    their_config,
    with_own_pattern,
)
from hf_efficient_attn.convert.registry import AUTO_CLASSES, COUNTERPARTS, table_of
from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.integration.layer_patterns import FIELD


@dataclass(frozen=True)
class TranslatedConfigs:
    """The configs of a conversion, from the source to the result.

    Attributes:
        source: the config of the source, translated to our family.
        ours: the same with the requested length, pattern and global tokens.
        theirs: what `ours` becomes if the target is of transformers; None: the target is of our family.
        is_dense: whether all tokens of the source attend to each other, so that the conversion makes it sparse.
        notes: what the user should know.
    """

    source: Any
    ours: Any
    theirs: TheirConfig | None
    is_dense: bool
    notes: list[str]


def translate_configs(config: Any, head: str, target: str, request: ConversionRequest) -> TranslatedConfigs:
    """Return the configs that the models of a conversion are built from.

    Args:
        config: config of the source.
        head: head of the source, a key of `AUTO_CLASSES`.
        target: model type of the result.

    Raises:
        ConfigurationError: a head, length, window, pattern or other field that the source or the target cannot have, or
            more positions than memory.
    """
    counterpart, their = table_of(config.model_type, target), COUNTERPARTS.get(target)
    if counterpart is None:
        source, is_dense, notes = config, False, []
        ours = apply_request(source, request, None)
    else:
        source, notes = our_config(counterpart, config, head, request.parity), note_replaced(config, request)
        is_dense = counterpart.is_dense and getattr(config, FIELD, None) is None
        if keeps_pattern(counterpart, config, request):
            source, counterpart = with_own_pattern(source, config), replace(counterpart, is_dense=False)
        ours = apply_request(source, request, counterpart)
    check_lengths(source, ours)
    check_memory(ours)
    if their is None:
        return TranslatedConfigs(source, ours, None, is_dense, notes)
    if head not in their.heads:
        heads = ", ".join(AUTO_CLASSES[name] for name in their.heads)
        raise ConfigurationError(f"{target} has no {AUTO_CLASSES[head]}; it has: {heads}.")
    return TranslatedConfigs(source, ours, their_config(their, ours, head), is_dense, notes)
