"""The `position_ids` that a sparsified model was called with: some models do not hand them on to their layers."""

import weakref
from threading import get_ident
from typing import Any

import torch
from torch import Tensor

# by the identity of the config, which a model shares with its layers; configs have no hash
_given: dict[int, "weakref.ref[Tensor]"] = {}
# configs whose last call by a thread, whose number stands beside the identity, gave no positions
_without: dict[tuple[int, int], "weakref.ref[Any]"] = {}


def note_positions(config: Any, positions: Any, are_known: bool = True) -> None:
    """Note the `position_ids` of a forward of a config's model, in the place of those of the last one.

    are_known: False: others may have been given by an argument without a name.
    """
    key = id(config)
    own = (key, get_ident())
    if isinstance(positions, Tensor):
        _given[key] = weakref.ref(positions, lambda _: _given.pop(key, None))
    else:
        _given.pop(key, None)
    if positions is None and are_known:
        _without[own] = weakref.ref(config, lambda _: _without.pop(own, None))
    else:
        _without.pop(own, None)


def given_positions(config: Any) -> Tensor | None:
    """Return what the model of a config was called with; None: nothing, or nobody knows."""
    if torch.compiler.is_compiling():
        return None
    noted = _given.get(id(config))
    return None if noted is None else noted()


def was_called_without(config: Any) -> bool:
    """Return whether this thread is known to have called the model of a config without positions."""
    noted = _without.get((id(config), get_ident()))
    return noted is not None and noted() is config
