"""Tiny models with spans, every parameter random."""

from typing import Any

import torch
from models_cases import TINY, randomize

import hf_efficient_attn as hea
from hf_efficient_attn.models.spans.module import span_modules

# of two layers, four heads each: none, on a ramp, whole, all of the limit
SPANS = [[0.0, 3.5, 12.0, 40.0], [0.0, 0.0, 1.25, 7.0]]
SHORT = {**TINY, "span_limit": 40, "span_ramp": 4}


def tiny(head: str = "ForCausalLM", preset: str = "enwik8_demo", spans: Any = SPANS, **fields: Any) -> Any:
    """Return a model in eval mode of 2 layers, 4 heads of 8, limit 40 and ramp 4, with adaptive spans as given."""
    config = getattr(hea.AdaptiveSpanConfig, preset)(**{**SHORT, **fields})
    torch.manual_seed(0)
    model = randomize(getattr(hea, f"AdaptiveSpan{head}")(config).eval())
    return set_spans(model, spans) if config.span == "adaptive" and config.frozen_spans is None else model


def set_spans(model: Any, spans: list[list[float]]) -> Any:
    """Give the heads of a model these spans, in tokens, and return it."""
    for module, tokens in zip(span_modules(model), spans, strict=True):
        module.ratio.data.copy_(torch.tensor(tokens) / module.limit)
    return model


def random_ids(rows: int, tokens: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, TINY["vocab_size"], (rows, tokens), generator=torch.Generator().manual_seed(seed))
