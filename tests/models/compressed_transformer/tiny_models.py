"""Tiny compressed Transformers whose every parameter is random."""

from typing import Any

from compressed_cases import compressed
from models_cases import random_ids


def build(auto_class: str | None = None, seed: int = 0, **fields: Any) -> Any:
    """Return a model in eval mode; see `Case.model`."""
    return compressed("tiny", **fields).model(auto_class, seed)


__all__ = ["build", "random_ids"]
