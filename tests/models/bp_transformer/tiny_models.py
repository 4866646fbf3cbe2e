"""Tiny BP-Transformers whose every parameter is random."""

from typing import Any

from models_cases import Case

import hf_efficient_attn as hea


def build(auto_class: str | None = None, seed: int = 0, **fields: Any) -> Any:
    """Return a model in eval mode; see `Case.model`."""
    return Case("bp", hea.BPTransformerConfig, tuple(fields.items())).model(auto_class, seed)
