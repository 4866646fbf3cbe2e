"""The cases in which backends are compared with `reference` on chosen keys."""

from collections.abc import Iterator

import torch
from backends_cases import MEMORY, Case
from chosen_choices import CHOICES

from hf_efficient_attn.layout.score_terms import Distance, SoftSpan

MASKS = ("none", "left", "right", "holes", "documents", "globals")
PATTERNS = ("causal", "full", "band", "causal band", "per head", "earlier keys", "globals")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
HEADS = ((4, 2), (2, 2), (6, 1))


def varied_cases() -> Iterator[Case]:
    """Yield cases in which every choice meets every mask, pattern, dtype, length and number of heads."""
    for number, choice in enumerate(CHOICES):
        for turn, num_keys in enumerate((65, 130, 1, 64, 33, 7, 96)):
            mask, pattern = MASKS[(number + turn) % len(MASKS)], PATTERNS[(number // 2 + turn) % len(PATTERNS)]
            dtype, heads = DTYPES[(number + 3 * turn) % len(DTYPES)], HEADS[(number + turn) % len(HEADS)]
            yield Case(pattern, num_keys, mask, dtype, heads, choice=choice)


def special_cases() -> Iterator[Case]:
    """Yield decoding, terms, sinks, soft caps, other memory and widths, two axes."""
    memory = list(MEMORY)
    for number, choice in enumerate(CHOICES):
        mask = MASKS[number % 5]
        yield Case("causal", 90, mask, num_queries=1 + 20 * (number % 2), choice=choice)
        yield Case("causal", 70, mask, label=Distance(-3, 6), choice=choice, has_own_values=number % 2 == 0)
        yield Case("band", 70, mask, label=SoftSpan(ramp=20), choice=choice)
        yield Case("causal", 70, mask, softcap=1.5, value_dim=24, choice=choice)
        if choice != "mean of groups":
            yield Case("causal", 70, mask, has_sinks=True, choice=choice, softcap=2.0 if number % 2 else None)
        yield Case(
            "causal", 50, mask, memory=tuple(memory[(number + 3 * i) % len(memory)] for i in range(4)), choice=choice
        )
        if not choice.startswith("order"):
            other = mask if mask in ("left", "right", "none") else "holes"
            yield Case("full", 40, other, num_queries=60, cross_offset=3, choice=choice)
        yield Case("causal", 60, "holes", DTYPES[number % 3], score_factor=100, choice=choice)
    places = {"label": Distance(-3, 6), "choice": "groups of places"}
    yield Case("causal", 200, num_queries=9, **places)
    yield Case("band", 200, "left", num_queries=9, has_own_values=True, **places)
