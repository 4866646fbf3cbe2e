"""Tiny ETCs whose every parameter is random."""

from typing import Any

from etc_cases import SHORT
from models_cases import Case, random_ids

import hf_efficient_attn as hea


def build(auto_class: str | None = "AutoModel", seed: int = 0, **fields: Any) -> Any:
    """Return a model in eval mode; see `Case.model`."""
    return Case("etc", hea.EtcTransformerConfig, tuple({**SHORT, **fields}.items())).model(auto_class, seed)


__all__ = ["build", "random_ids"]
