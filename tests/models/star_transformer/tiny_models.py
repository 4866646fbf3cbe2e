"""Tiny stars whose every parameter is random."""

from typing import Any

from models_cases import Case, random_ids

import hf_efficient_attn as hea

# the update form of fastNLP, whose heads together are not as wide as the model
FASTNLP = {"norm_position": "pre", "hidden_act": "leaky_relu", "ring": "zero_ends", "head_dim": 6}


def build(auto_class: str | None = None, seed: int = 0, **fields: Any) -> Any:
    """Return a model in eval mode; see `Case.model`."""
    return Case("star", hea.StarTransformerConfig, tuple(fields.items())).model(auto_class, seed)


__all__ = ["FASTNLP", "build", "random_ids"]
