"""Tiny Routing Transformers whose every parameter is random."""

from typing import Any

import torch
from models_cases import TINY, Case, random_ids

import hf_efficient_attn as hea
from hf_efficient_attn.patterns import Band

FIELDS = {"num_routing_heads": 2, "num_clusters": 3, "cluster_tokens": 4, "attention_pattern": Band(3, 0)}


def build(auto_class: str | None = None, seed: int = 0, **fields: Any) -> Any:
    """Return a model in eval mode; see `Case.model`."""
    case = Case(
        "routing", hea.RoutingTransformerConfig, tuple({**FIELDS, "max_relative_distance": 3, **fields}.items())
    )
    return case.model(auto_class, seed)


def tokens(rows: int, length: int, seed: int = 2) -> torch.Tensor:
    return random_ids(rows, length, seed)


__all__ = ["TINY", "build", "tokens"]
