"""What `bench attention` times: patterns by name, the inputs of a length, and calls on them as cases."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from math import isqrt
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hf_efficient_attn.analysis.pattern_sources import read_pattern
from hf_efficient_attn.attention.functional import attention
from hf_efficient_attn.bench.report import markdown_table
from hf_efficient_attn.bench.timing import Case, summarize, time_once
from hf_efficient_attn.errors import EfficientAttentionError
from hf_efficient_attn.integration.cache_layers import Padding, PatternLayer
from hf_efficient_attn.layout.call import AttentionCall, Inputs
from hf_efficient_attn.layout.decode_keys import maskless
from hf_efficient_attn.layout.dense_mask import additive_mask
from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.layout.token_mask import NO_MASK
from hf_efficient_attn.patterns.bands import Band, Causal, Dilated, Full
from hf_efficient_attn.patterns.big_bird import bigbird
from hf_efficient_attn.patterns.global_tokens import GlobalTokens
from hf_efficient_attn.patterns.grid import Grid
from hf_efficient_attn.patterns.pattern import Pattern

SIDE_TOKENS = 256
NUM_GLOBAL_TOKENS = 16
DILATION = 4
BLOCK_TOKENS, NUM_RANDOM_BLOCKS = 64, 3
# patches on either side of a patch
SIDE_PATCHES = 3
SEED = 0
DENSE = "dense"
DECODE_STEPS = 16
OVERHEAD_LENGTHS = (128, 256, 512)
# auto chooses SDPA for both at these lengths; the band needs a mask, because it is shorter than the text by a quarter
OVERHEAD_PATTERNS: dict[str, Callable[[int], Pattern]] = {
    "causal": lambda _: Causal(),
    "wide band": lambda tokens: Band(3 * tokens // 4, 3 * tokens // 4),
}
# a decoding step with a layer of a cache -> the number of first tokens that the layer holds besides the last ones
STEPS = {"step, PatternCache": 4, "step, SpanCache": 0}
OVERHEAD_ROWS = (*OVERHEAD_PATTERNS, *STEPS)
# pairs of calls per round of the other measurements, because these calls are short
PAIRS = 10


def scattered(tokens: int) -> tuple[int, ...]:
    """Return the positions of the global tokens of `longformer`, evenly scattered over the sequence."""
    return tuple(sorted({index * tokens // NUM_GLOBAL_TOKENS for index in range(NUM_GLOBAL_TOKENS)}))


def longformer(tokens: int) -> Pattern:
    """Return a band and scattered global tokens (Beltagy et al., 2020)."""
    return Band(SIDE_TOKENS, SIDE_TOKENS) | GlobalTokens(scattered(tokens))


def neighbourhood(tokens: int) -> Pattern:
    """Return 7 × 7 neighbours in an image that is as square as the length allows (Hassani et al., 2023)."""
    height = next(height for height in range(isqrt(tokens), 0, -1) if tokens % height == 0)
    axis = Band(SIDE_PATCHES, SIDE_PATCHES)
    return Grid([height, tokens // height], [axis, axis])


# name -> the pattern for a length in tokens
PRESETS: dict[str, Callable[[int], Pattern]] = {
    "band": lambda tokens: Band(SIDE_TOKENS, SIDE_TOKENS),
    "longformer": longformer,
    "bigbird": lambda tokens: bigbird(BLOCK_TOKENS, NUM_RANDOM_BLOCKS),
    "dilated": lambda tokens: Dilated(DILATION * SIDE_TOKENS, DILATION * SIDE_TOKENS, DILATION),
    "neighbourhood": neighbourhood,
    "causal_band": lambda tokens: Band(2 * SIDE_TOKENS, 0),
    "full": lambda tokens: Full(),
    "causal": lambda tokens: Causal(),
}


def pattern_of(name: str, tokens: int) -> Pattern:
    """Return the preset called `name` for a length, or the pattern that an expression or a JSON file describes.

    Raises:
        ConfigurationError: it is none of these.
    """
    if name in PRESETS:
        return PRESETS[name](tokens)
    try:
        return read_pattern(name)
    except EfficientAttentionError as error:
        raise type(error)(f"{error} Or name a preset: {', '.join(PRESETS)}.") from error


def decode_pattern_of(name: str, tokens: int) -> Pattern:
    """Return the causal form, for decoding; `bigbird` has a causal preset, because its last block is global."""
    if name == "bigbird":
        return bigbird(BLOCK_TOKENS, NUM_RANDOM_BLOCKS, causal=True)
    return pattern_of(name, tokens).causal()


@dataclass(frozen=True)
class Shape:
    """What all calls have in common, in JSON types."""

    batch_size: int
    num_heads: int
    head_dim: int
    dtype: str
    device: str

    def tensors(self, tokens: int) -> list[Tensor]:
        """Return q, k and v, each [batch, heads, tokens, head_dim], with requires_grad, the same in every call."""
        generator = torch.Generator().manual_seed(SEED)
        size = (self.batch_size, self.num_heads, tokens, self.head_dim)
        drawn = (torch.randn(size, generator=generator) for _ in range(3))
        return [tensor.to(self.device, getattr(torch, self.dtype)).requires_grad_() for tensor in drawn]


@dataclass(frozen=True)
class Call:
    """One way to compute attention: `forward(*inputs)`, on inputs in its own memory layout.

    Attributes:
        no_backward: a sentence that says why the backward pass must not be tried; None: it may.
    """

    forward: Callable[..., Tensor]
    inputs: list[Tensor]
    no_backward: str | None = None

    def run_forward(self) -> Tensor:
        """Return the output without recording gradients."""
        with torch.no_grad():
            return self.forward(*(tensor.detach() for tensor in self.inputs))

    def forward_case(self) -> Case:
        """Return the case of a forward pass."""
        return Case(lambda _: self.run_forward())

    def forward_backward_case(self, target: Tensor) -> Case:
        """Return the case of a forward and backward pass; `target` is the gradient of the output."""
        return Case(lambda _: torch.autograd.grad(self.forward(*self.inputs), self.inputs, target))


def repeated(case: Case, calls: int) -> Case:
    """Return the case of several calls, for one sample of the clock."""

    def run(state: object) -> None:
        for _ in range(calls):
            case.run(state)

    return Case(run, case.prepare)


def own_call(pattern: Pattern, inputs: list[Tensor], backend: str) -> Call:
    """Return our attention with a backend."""

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, pattern, backend=backend)  # type: ignore[return-value]

    return Call(forward, inputs)


def dense_call(inputs: list[Tensor]) -> Call:
    """Return torch's SDPA over all pairs, which all others are compared with."""
    return Call(lambda q, k, v: scaled_dot_product_attention(q, k, v), inputs)


def call_of(layout: Layout, shape: Shape) -> AttentionCall:
    """Return the call of a forward pass, without tensors."""
    dtype = getattr(torch, shape.dtype)
    inputs = Inputs(shape.device, dtype, shape.head_dim, shape.head_dim, shape.num_heads, shape.batch_size)
    return AttentionCall(layout, inputs)


def decode_case(name: str, inputs: list[Tensor], backend: str) -> Case:
    """Return the case of `DECODE_STEPS` queries, one after the other, each with a cache that is one token longer.

    Every step has a new length, as in decoding, so that building its layout is part of the time. Caches of the previous
    step are kept.
    """
    q, k, v = (tensor.detach() for tensor in inputs)
    tokens = k.shape[2]
    pattern = decode_pattern_of(name, tokens)

    def step(length: int) -> None:
        query, keys, values = q[:, :, :1], k[:, :, :length], v[:, :, :length]
        if backend == DENSE:
            scaled_dot_product_attention(query, keys, values)
        else:
            attention(query, keys, values, pattern, backend=backend)

    def run(_: object) -> None:
        for length in decode_lengths(tokens):
            step(length)

    def prepare() -> None:
        clear_caches()
        step(max(1, decode_lengths(tokens).start - 1))

    return Case(torch.no_grad()(run), torch.no_grad()(prepare))


def decode_lengths(tokens: int) -> range:
    """Return the lengths of the cache in the timed steps; the last has `tokens` keys."""
    return range(max(1, tokens - DECODE_STEPS + 1), tokens + 1)


def clear_caches() -> None:
    """Forget every layout and every draw of random blocks; compiled kernels are kept."""
    for name, module in list(sys.modules.items()):
        if name.startswith(("hf_efficient_attn.layout.", "hf_efficient_attn.patterns.")):
            for value in vars(module).values():
                # a cache class also has this method
                if not isinstance(value, type):
                    getattr(value, "cache_clear", lambda: None)()


def build_step(name: str, tokens: int, backend: str, shape: dict[str, object]) -> Callable[[], object]:
    """Return one forward and backward pass of our attention or of dense attention; all arguments are of JSON types."""
    inputs = Shape(**shape).tensors(tokens)  # type: ignore[arg-type]
    call = dense_call(inputs) if backend == DENSE else own_call(pattern_of(name, tokens), inputs, backend)
    target = torch.ones_like(inputs[0])
    return lambda: torch.autograd.grad(call.forward(*inputs), inputs, target)


def measure_overhead(shape: Shape, repeats: int) -> list[dict[str, Any]]:
    """Return a row per pattern and length: the microseconds of a forward call beyond those of SDPA just after it.

    For decoding steps the length is the number of tokens that a layer holds.
    """
    rows = []
    for name in OVERHEAD_ROWS:
        for tokens in OVERHEAD_LENGTHS:
            with torch.no_grad():
                inputs = [each.detach() for each in shape.tensors(tokens)]
                ours, plain = (
                    both(OVERHEAD_PATTERNS[name](tokens), inputs)
                    if name in OVERHEAD_PATTERNS
                    else steps(STEPS[name], inputs)
                )
                device = torch.device(shape.device)
                pairs = [(time_once(ours, device), time_once(plain, device)) for _ in range(1 + PAIRS * repeats)]
            # the first pair compiles the layout
            beyond = [1e6 * (mine - other) for mine, other in pairs[1:]]
            rows.append({"pattern": name, "tokens": tokens, "microseconds": summarize(beyond)})
    return rows


def both(pattern: Pattern, inputs: list[Tensor]) -> tuple[Case, Case]:
    """Return the cases of `attention`, and of SDPA with a precomputed mask."""
    q, k, v = inputs
    layout = Layout(pattern, q.shape[1], q.shape[2], k.shape[2])
    is_causal = maskless(layout) is not None
    mask = None if is_causal else additive_mask(layout, NO_MASK, len(q), q.device, q.dtype)[0]
    return (
        Case(lambda _: attention(q, k, v, pattern)),
        Case(lambda _: scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal)),
    )


def steps(num_first: int, inputs: list[Tensor]) -> tuple[Case, Case]:
    """Return the cases of a decoding step with a full cache layer, and of SDPA over the same number of keys."""
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
    lines = [[name, *(figures[name, tokens] for tokens in OVERHEAD_LENGTHS)] for name in names]
    return markdown_table(["pattern", *(f"{tokens:,}" for tokens in OVERHEAD_LENGTHS)], lines)
