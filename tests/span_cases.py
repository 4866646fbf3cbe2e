"""The models with learned spans under contract; a family of `families.py`."""

from typing import Any

from family import Family
from models_cases import Case, case_of

import hf_efficient_attn as hea


def span(name: str, preset: str = "enwik8_demo", **fields: Any) -> Case:
    """Return a case of adaptive span, whose limit and ramp are short enough to matter."""
    return case_of(f"span-{name}", hea.AdaptiveSpanConfig, {"span_limit": 9, "span_ramp": 3, **fields}, preset)


SPANS = Family(
    "adaptive_span",
    (
        span("adaptive", is_traced=False),
        span("fixed", span="fixed"),
        span("dynamic", span="dynamic"),
        span("modern", "modern", shows_a_route=True, is_traced=False),
        span("modern-dynamic", "modern", is_traced=False, span="dynamic"),
        span("modern-frozen", "modern", span_penalty=0.0, frozen_spans=[[0.0, 2.5, 9.0, 4.0], [1.0, 1.0, 7.2, 0.0]]),
        span("encoder", "modern", is_traced=False, is_causal=False),
    ),
    decoder="span-modern",
    trained="span-modern",
    instead={
        "TP": ("span-modern", "span-dynamic"),
        "ZeRO": ("span-modern-dynamic",),
        "halo": ("span-modern", "span-dynamic"),
    },
    refuses={
        "ZeRO": "DeepSpeed's ZeRO trains copies of the learned spans",
    },
)
