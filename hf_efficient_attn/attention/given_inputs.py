"""The `position_ids` and the cache with which a thread called a sparsified model, for attention that gets neither."""

import weakref
from dataclasses import dataclass
from threading import get_ident
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache


@dataclass(frozen=True)
class Note:
    """The inputs with which a thread last called the model of a config.

    Attributes:
        config: the config that this note belongs to, since an identity may be reused.
        positions: the `position_ids`; None: they were no tensor.
        is_without: whether the model is known to have been called without positions.
        cache: the cache; None: none was given.
    """

    config: "weakref.ref[Any]"
    positions: "weakref.ref[Tensor] | None" = None
    is_without: bool = False
    cache: "weakref.ref[Any] | None" = None


# by the identities of the config, which a model shares with its layers and which has no hash, and of the thread
_notes: dict[tuple[int, int], Note] = {}


def note_inputs(config: Any, positions: Any, are_known: bool = True, cache: Any = None) -> None:
    """Note the `position_ids` and the cache of this thread's forward pass of a config's model, over the last ones.

    are_known: if False, other positions may have been passed as a positional argument.
    """
    key = (id(config), get_ident())
    given = weakref.ref(positions) if isinstance(positions, Tensor) else None
    _notes[key] = Note(
        weakref.ref(config, lambda _: _notes.pop(key, None)),
        given,
        positions is None and are_known,
        weakref.ref(cache) if isinstance(cache, Cache) else None,
    )


def given_positions(config: Any) -> Tensor | None:
    """Return the positions with which this thread called the model of a config; None: none, or unknown."""
    if torch.compiler.is_compiling():
        return None
    note = _note_of(config)
    return None if note is None or note.positions is None else note.positions()


def given_cache(config: Any) -> Cache | None:
    """Return the cache with which this thread called the model of a config; None: none, or unknown."""
    if torch.compiler.is_compiling():
        return None
    note = _note_of(config)
    return None if note is None or note.cache is None else note.cache()


def was_called_without(config: Any) -> bool:
    """Return whether this thread is known to have called the model of a config without positions."""
    note = _note_of(config)
    return note is not None and note.is_without


def is_computed_again() -> bool:
    """Return whether a backward pass is recomputing a layer, possibly in a thread of its own.

    The model may have been called with other positions since.
    """
    return torch._C._current_graph_task_id() != -1


def _note_of(config: Any) -> Note | None:
    note = _notes.get((id(config), get_ident()))
    return note if note is not None and note.config() is config else None
