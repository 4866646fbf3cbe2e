"""The mask of the whole text, for a model of transformers that asks for one and knows only its part of the text."""

from contextvars import ContextVar
from typing import Any

from torch import Tensor

# the config of the model that is being called, and the table without a kind
_current: ContextVar[tuple[Any, Tensor | None]] = ContextVar("whole_text", default=(None, None))


def set_whole_text(config: Any, table: Tensor | None) -> None:
    """Let masks that a model with this config asks for, in this thread, be the token table of its whole text."""
    _current.set((config, table))


def whole_table(config: Any) -> Tensor | None:
    """Return the token table of the whole text, without its kind; None: the model has the whole text."""
    owner, table = _current.get()
    return table if owner is config else None
