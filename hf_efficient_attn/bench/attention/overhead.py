"""What a call of `attention` costs beside its kernel: its time less that of torch's SDPA on the same tensors.

Steps of decoding, too: a token is written into a layer of a cache, and its query reads what the layer holds.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hf_efficient_attn.attention.cache_layers import Padding, PatternLayer
from hf_efficient_attn.attention.functional import attention
from hf_efficient_attn.bench.attention.cases import Shape
from hf_efficient_attn.bench.harness.report import markdown_table
from hf_efficient_attn.bench.harness.timing import Case, summarize, time_once
from hf_efficient_attn.layout.dense.additive import additive_mask
from hf_efficient_attn.layout.dense.maskless import maskless
from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.layout.token_mask import NO_MASK
from hf_efficient_attn.patterns.bands import Band, Causal
from hf_efficient_attn.patterns.global_tokens import GlobalTokens
from hf_efficient_attn.patterns.pattern import Pattern

LENGTHS = (128, 256, 512)
# of both auto takes SDPA at these lengths: with a mask for the band, which is as wide as the text but for a quarter
PATTERNS: dict[str, Callable[[int], Pattern]] = {
    "causal": lambda _: Causal(),
    "wide band": lambda tokens: Band(3 * tokens // 4, 3 * tokens // 4),
}
# a step of decoding with the layers of a cache, by how many first tokens they hold besides the last ones
STEPS = {"step, PatternCache": 4, "step, SpanCache": 0}
ROWS = (*PATTERNS, *STEPS)
# pairs of calls per round of the other measurements: what is measured is short
PAIRS = 10


def measure_overhead(shape: Shape, repeats: int) -> list[dict[str, Any]]:
    """Return a row per pattern and length: the microseconds of a forward call beyond those of SDPA just after it.

    For steps of decoding the length is that of what a layer holds.
    """
    rows = []
    for name in ROWS:
        for tokens in LENGTHS:
            with torch.no_grad():
                inputs = [each.detach() for each in shape.tensors(tokens)]
                ours, plain = both(PATTERNS[name](tokens), inputs) if name in PATTERNS else steps(STEPS[name], inputs)
                device = torch.device(shape.device)
                pairs = [(time_once(ours, device), time_once(plain, device)) for _ in range(1 + PAIRS * repeats)]
            # the first one compiles the layout
            beyond = [1e6 * (mine - other) for mine, other in pairs[1:]]
            rows.append({"pattern": name, "tokens": tokens, "microseconds": summarize(beyond)})
    return rows


def both(pattern: Pattern, inputs: list[Tensor]) -> tuple[Case, Case]:
    """Return the cases of `attention`, and of SDPA, whose mask is made beforehand."""
    q, k, v = inputs
    layout = Layout(pattern, q.shape[1], q.shape[2], k.shape[2])
    is_causal = maskless(layout) is not None
    mask = None if is_causal else additive_mask(layout, NO_MASK, len(q), q.device, q.dtype)[0]
    return (
        Case(lambda _: attention(q, k, v, pattern)),
        Case(lambda _: scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal)),
    )


def steps(num_first: int, inputs: list[Tensor]) -> tuple[Case, Case]:
    """Return the cases of a step of decoding with a full layer of a cache, and of SDPA over as many keys."""
    left = inputs[1].shape[2] - num_first
    layer = PatternLayer(num_first, left, Padding())
    layer.update(inputs[1], inputs[2])
    q, k, v = (each[:, :, -1:].contiguous() for each in inputs)
    keys, values = (torch.cat([each, each[:, :, -1:]], 2) for each in inputs[1:])
    pattern: Pattern = Band(left, 0)
    pattern = (pattern | GlobalTokens(range(num_first))).causal() if num_first else pattern
    return (
        Case(lambda _: attention(q, *layer.update(k, v), pattern)),
        Case(lambda _: scaled_dot_product_attention(q, keys, values)),
    )


def overhead_table(rows: list[dict[str, Any]]) -> str:
    """Return a table with a column per length."""
    figures = {(row["pattern"], row["tokens"]): f"{row['microseconds']['median']:.0f}" for row in rows}
    names = dict.fromkeys(name for name, _ in figures)
    lines = [[name, *(figures[name, tokens] for tokens in LENGTHS)] for name in names]
    return markdown_table(["pattern", *(f"{tokens:,}" for tokens in LENGTHS)], lines)
