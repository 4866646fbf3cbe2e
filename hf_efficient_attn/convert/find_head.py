"""The head of a checkpoint whose config names none, by the names of its weights."""

from collections.abc import Iterable
from typing import Any

from hf_efficient_attn.convert.counterpart import Counterpart
from hf_efficient_attn.convert.notes import summarize
from hf_efficient_attn.convert.registry import AUTO_CLASSES
from hf_efficient_attn.convert.rename import covers
from hf_efficient_attn.convert.weight_names import is_old_buffer, weight_names
from hf_efficient_attn.errors import ConfigurationError


def find_head(path: str, config: Any, counterpart: Counterpart) -> str:
    """Return the one head that the names of the weights fit, and the config allows.

    Raises:
        ConfigurationError: none, or several, which are listed.
        CheckpointError: no weights, or damaged ones.
    """
    names = weight_names(path)
    found = fitting_heads(counterpart, names)
    # two heads may have one set of weights, of which the config can only be that of one
    heads = [head for head in found if _is_allowed(counterpart, config, head)] or found
    if len(heads) == 1:
        return heads[0]
    outside = summarize(_outside_backbone(counterpart, names))
    choice = ", ".join(AUTO_CLASSES[head] for head in heads or counterpart.heads)
    raise ConfigurationError(
        f"The config of {path} has no architectures, and its weights beside the backbone fit "
        f"{'several heads' if heads else 'no head'}: {outside}. Choose with head (--head): {choice}."
    )


def fitting_heads(counterpart: Counterpart, names: Iterable[str]) -> list[str]:
    """Return the heads that find all their weights among the names, and leave none of another head."""
    present = [name for name in names if not is_old_buffer(name)]
    outside = _outside_backbone(counterpart, present)
    if not outside:
        return ["Model"]
    return [head for head in counterpart.heads if head != "Model" and _fits(counterpart, head, present, outside)]


def _fits(counterpart: Counterpart, head: str, present: list[str], outside: list[str]) -> bool:
    table = counterpart.heads[head]
    # maps onto the vocabulary may be that of the embedding, and are then not saved
    needed = [theirs for theirs, ours in table.items() if "lm_head" not in ours]
    is_complete = all(any(covers((theirs,), name) for name in present) for theirs in needed)
    return is_complete and all(covers((*table, *counterpart.unused), name) for name in outside)


def _outside_backbone(counterpart: Counterpart, names: Iterable[str]) -> list[str]:
    """Return the names that are not of the backbone; none, if no name has its prefix: it was saved alone."""
    listed = list(names)
    if not any(name.startswith(counterpart.prefix) for name in listed):
        return []
    return [
        name
        for name in listed
        if not (name.startswith(counterpart.prefix) or is_old_buffer(name) or covers(counterpart.left_behind, name))
    ]


def _is_allowed(counterpart: Counterpart, config: Any, head: str) -> bool:
    try:
        counterpart.to_ours(config, head, False)
    except ConfigurationError:
        return False
    return True
