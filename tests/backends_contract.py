"""The contract of a backend, as data: calls, what is correct for them, and how far a backend may be from it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from hf_efficient_attn.backends import reference
from hf_efficient_attn.backends.protocol import Backend
from hf_efficient_attn.layout.call import AttentionCall, Inputs
from hf_efficient_attn.layout.dense.additive import close_pairs, term_bias
from hf_efficient_attn.layout.dense.pairs import allowed_pairs
from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.layout.sinks import cap
from hf_efficient_attn.layout.terms import Distance, Label, SoftSpan, SpanRelation, Term
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.patterns.bands import Band, Causal, Dilated, Full
from hf_efficient_attn.patterns.big_bird import bigbird
from hf_efficient_attn.patterns.blocks import BlockLocal
from hf_efficient_attn.patterns.compressed_keys import CompressedKeys
from hf_efficient_attn.patterns.global_tokens import GlobalTokens
from hf_efficient_attn.patterns.pattern import Pattern
from hf_efficient_attn.patterns.per_head import PerHead
from hf_efficient_attn.patterns.span_tree import SpanTree
from hf_efficient_attn.patterns.tables import KeyTable

BATCH_SIZE = 2
# of their gradient, beside those of q, k, v and a term
NUMBER_OF_SINKS = 9
HEAD_DIM = 16
SCALE = 0.3
SEED = 7
SHORTEST_SPAN = 4.5
SOFT_SPAN = SoftSpan(ramp=20, num_inner=5)

PATTERNS: dict[str, Pattern] = {
    "full": Full(),
    "causal": Causal(),
    "band": Band(20, 7),
    "causal band": Band(33, 0),
    "earlier keys": Band(9, -1),
    "dilated": Dilated(24, 24, 4),
    "globals": Band(8, 8) | GlobalTokens([0, 5]),
    "far keys": ~Band(3, 3) & Causal(),
    "block local": BlockLocal(48),
    "random": bigbird(block_tokens=16, num_random_blocks=2),
    "causal random": bigbird(block_tokens=16, num_random_blocks=2, causal=True),
    "keyless blocks": BlockLocal(16) & ~GlobalTokens(range(16, 48)),
    # rows of unequal length, and fewer than the queries of long inputs
    "compressed keys": CompressedKeys(block_tokens=6, step=4),
    "key table": KeyTable([{query, query // 2, *range(query * 7 % 5, query % 40)} for query in range(700)]),
    "per head": PerHead([Band(5, 5), Dilated(12, 0, 3)]),
}
# its positions are the nodes of a tree, so that few lengths are possible
SPAN_TREE = "span tree"
# for numbers of heads that three divides
THREE_PATTERNS = "three patterns"
MORE_PATTERNS: dict[str, Pattern] = {
    SPAN_TREE: SpanTree(2),
    THREE_PATTERNS: PerHead([Band(2, 0), bigbird(4, 1, plan="authors"), Causal()]) | Dilated(9, 9, 3),
}
TREE_TOKENS, TREE_POSITIONS = 64, 127
LENGTHS = (1, 2, 63, 64, 65, 127, 750, 512)
MASKS = ("none", "left", "right", "holes", "documents", "globals")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# what lies where: views of drawn tensors [batch, heads, tokens, width] that no kernel may take for contiguous ones
MEMORY: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda drawn: drawn,
    "tokens before heads": lambda drawn: drawn.transpose(1, 2).contiguous().transpose(1, 2),
    "tokens last": lambda drawn: drawn.transpose(2, 3).contiguous().transpose(2, 3),
    "every second number": lambda drawn: drawn.repeat_interleave(2, 3)[..., ::2],
    "one number": lambda drawn: drawn[:1, :1, :1, :1].expand(drawn.shape),
    "a number a token": lambda drawn: drawn[..., :1].expand(drawn.shape),
    "one token": lambda drawn: drawn[:, :, :1].expand(drawn.shape),
    "one head": lambda drawn: drawn[:1, :1].expand(drawn.shape),
    "overlapping heads": lambda drawn: drawn.flatten()[: drawn.shape[:3].numel() + drawn[0, 0].numel()].as_strided(
        drawn.shape, (drawn.shape[1], 1, drawn.shape[3], 1)
    ),
    "overlapping tokens": lambda drawn: drawn.flatten()[: drawn.shape[2] + drawn.shape[3]].as_strided(
        drawn.shape, (0, 0, 1, 1)
    ),
}
# query heads, key heads
HEADS = ((2, 2), (4, 2), (6, 1))


def token_mask(name: str, num_keys: int) -> TokenMask:
    """Return a mask of one kind; the examples differ, and under "holes" the second has no token at all."""
    index = torch.arange(num_keys).expand(BATCH_SIZE, -1)
    example = torch.arange(BATCH_SIZE)[:, None]
    padding = (num_keys * (1 + example)) // 5
    masks = {
        "left": TokenMask(key_mask=index >= padding),
        "right": TokenMask(key_mask=index < num_keys - padding),
        "holes": TokenMask(key_mask=(index % 7 != 3) & (index >= 2) & (example == 0)),
        "documents": TokenMask(segment_ids=index // (3 + num_keys // (3 + example)), key_mask=index % 50 != 1),
        "globals": TokenMask(index < num_keys - padding, global_mask=index % (11 + num_keys // 2) == 4 + example),
    }
    return masks.get(name, TokenMask())


def cross_mask(name: str, num_keys: int, num_positions: int) -> TokenMask:
    """Return a mask of two axes, that of the keys and that of the queries, which are padded on different sides."""
    of_queries = token_mask({"left": "right", "right": "left"}.get(name, name), num_positions)
    of_keys = token_mask(name, num_keys)
    return TokenMask(of_keys.key_mask, of_keys.segment_ids, None, of_queries.key_mask, of_queries.segment_ids)


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        num_queries: None: as many as keys; else the last ones, as in cached decoding.
        cross_offset: position of the first query on an axis of its own; None: the axis is that of the keys.
        label: of a learned term; None: there is no term.
        has_own_values: every query of every example has values of its own; else they are those of a head.
        memory: of q, k, v and the gradient of the output, names of `MEMORY`.
        learned: which of q, k, v and the values of the term require gradients.
        score_factor: multiplies q; from about 50 on, e to the power of a score is infinite.
        has_sinks: every head has a sink, which requires a gradient; the first head's has no weight, being -inf.
        softcap: bound of the scores.
    """

    pattern: str = "band"
    num_keys: int = 65
    mask: str = "none"
    dtype: torch.dtype = torch.float32
    heads: tuple[int, int] = (4, 2)
    num_queries: int | None = None
    label: Label | None = None
    has_own_values: bool = False
    value_dim: int = HEAD_DIM
    needs_grad: bool = True
    memory: tuple[str, str, str, str] = ("plain",) * 4
    learned: tuple[int, ...] = (0, 1, 2, 3)
    score_factor: float = 1.0
    scale: float = SCALE
    has_sinks: bool = False
    softcap: float | None = None
    cross_offset: int | None = None

    def __str__(self) -> str:
        parts = (self.pattern, self.num_keys, self.mask, str(self.dtype)[6:], f"{self.heads[0]} of {self.heads[1]}")
        extra = (
            self.num_queries,
            self.label and self.label.kind,
            self.has_own_values and "own values",
            self.value_dim != HEAD_DIM and "other values",
            ", ".join(name for name in self.memory if name != "plain"),
            self.learned != Case.learned and f"learned {self.learned}",
            self.score_factor != 1 and f"scores x {self.score_factor:g}",
            self.scale != SCALE and f"scale {self.scale:g}",
            self.has_sinks and "sinks",
            self.cross_offset is not None and f"cross from {self.cross_offset}",
            self.softcap and f"capped at {self.softcap:g}",
        )
        return ", ".join(str(part) for part in parts + tuple(part for part in extra if part))

    @property
    def layout(self) -> Layout:
        """The layout, the queries being the last positions, if not on an axis of their own."""
        num_queries, is_cross = self.num_queries or self.num_keys, self.cross_offset is not None
        pattern = (PATTERNS | MORE_PATTERNS)[self.pattern]
        offset = self.num_keys - num_queries if self.cross_offset is None else self.cross_offset
        return Layout(pattern, self.heads[0], num_queries, self.num_keys, offset, 1, is_cross=is_cross)

    @property
    def tokens(self) -> TokenMask:
        """The masks."""
        if self.layout.num_positions is None:
            return token_mask(self.mask, self.num_keys)
        return cross_mask(self.mask, self.num_keys, self.layout.num_positions)

    def call(self, device: str = "cpu", values: Sequence[Tensor] = (), sinks: Tensor | None = None) -> AttentionCall:
        """What the backend is given, and asked of; `values`: of the term."""
        masks = self.tokens.tensors
        sizes = (HEAD_DIM, self.value_dim, self.heads[1], BATCH_SIZE)
        return AttentionCall(
            layout=self.layout,
            inputs=Inputs(device, self.dtype, *sizes, needs_grad=self.needs_grad),
            tokens=TokenMask(*(None if mask is None else mask.to(device) for mask in masks)),
            terms=tuple(Term(each, self.label) for each in values if self.label),
            sinks=torch.zeros(self.heads[0], device=device) if sinks is None and self.has_sinks else sinks,
            softcap=self.softcap,
            scale=self.scale,
        )


@dataclass
class Tensors:
    """Leaves of a call, and the gradient of its output."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    values: list[Tensor] = field(default_factory=list)
    sinks: Tensor | None = None

    def leaves(self, case: Case) -> dict[int, Tensor]:
        """Return what gradients are asked of, by its number among q, k, v, the values of the term, and the sinks."""
        listed = dict(enumerate((self.q, self.k, self.v, *self.values)))
        own = {number: leaf for number, leaf in listed.items() if case.needs_grad and number in case.learned}
        return own if self.sinks is None or not case.needs_grad else {**own, NUMBER_OF_SINKS: self.sinks}


def tensors_of(case: Case, dtype: torch.dtype, device: str = "cpu") -> Tensors:
    """Return the same numbers, rounded to the dtype of the case, in any dtype."""
    generator = torch.Generator().manual_seed(SEED)
    num_queries, (num_heads, num_key_heads) = case.layout.num_queries, case.heads

    def draw(*shape: int, factor: float = 1.0) -> Tensor:
        drawn = factor * torch.randn(*shape, generator=generator, dtype=torch.float64)
        return drawn.to(case.dtype).to(device, dtype)

    def draw_values(label: Label) -> Tensor:
        sizes = (BATCH_SIZE, num_heads, num_queries) if case.has_own_values else (1, num_heads, 1)
        values = draw(*sizes, label.num_values)
        # spans, none of them shorter than the label says
        return values if label.idle is None else (15 * values.abs()).clamp(min=SHORTEST_SPAN)

    drawn = (
        draw(BATCH_SIZE, num_heads, num_queries, HEAD_DIM, factor=case.score_factor),
        draw(BATCH_SIZE, num_key_heads, case.num_keys, HEAD_DIM),
        draw(BATCH_SIZE, num_key_heads, case.num_keys, case.value_dim),
        draw(BATCH_SIZE, num_heads, num_queries, case.value_dim),
    )
    views = [MEMORY[name](tensor) for name, tensor in zip(case.memory, drawn, strict=True)]
    values = [draw_values(case.label)] if case.label else []
    sinks = draw(num_heads).index_fill(0, torch.tensor(0, device=device), -torch.inf) if case.has_sinks else None
    return Tensors(*views, values, sinks)


# out, lse, and the gradients of the leaves
Results = dict[str, Tensor]


def results(case: Case, backend: Backend, dtype: torch.dtype, device: str = "cpu") -> Results:
    """Return everything a backend computes for a case, in float64 on CPU."""
    tensors = tensors_of(case, dtype, device)
    for leaf in tensors.leaves(case).values():
        leaf.requires_grad_()
    out, lse = backend.attend(tensors.q, tensors.k, tensors.v, case.call(device, tensors.values, tensors.sinks))
    assert lse is not None
    assert out.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert not lse.requires_grad
    assert lse.shape == out.shape[:3]
    found = {"out": out, "lse": lse}
    if case.needs_grad:
        found |= gradients_of(out, tensors, case)
    return {name: tensor.detach().cpu().double() for name, tensor in found.items()}


def gradients_of(out: Tensor, tensors: Tensors, case: Case) -> Results:
    """Return the gradients of the leaves."""
    leaves = tensors.leaves(case)
    gradients = torch.autograd.grad(out, tuple(leaves.values()), tensors.grad_out)
    return {f"gradient of leaf {number}": gradient for number, gradient in zip(leaves, gradients, strict=True)}


def plain_attention(case: Case, dtype: torch.dtype) -> Results:
    """Return the results of matmul, softmax, matmul in `dtype`: the rounding that any kernel may show."""
    tensors = tensors_of(case, dtype)
    for leaf in tensors.leaves(case).values():
        leaf.requires_grad_()
    tokens, cpu = case.tokens, torch.device("cpu")
    keys, values = (each.repeat_interleave(case.heads[0] // case.heads[1], 1) for each in (tensors.k, tensors.v))
    scores = cap(tensors.q @ keys.transpose(-1, -2) * case.scale, case.softcap)
    bias = term_bias([Term(each, case.label) for each in tensors.values if case.label], case.layout, tokens, cpu)
    allowed = allowed_pairs(case.layout, tokens, BATCH_SIZE, cpu)
    if bias is not None:
        bias, allowed = close_pairs(bias, allowed)
        scores = scores + bias.to(dtype)
    allowed = torch.ones((), dtype=torch.bool) if allowed is None else allowed
    lowest = torch.finfo(dtype).min
    sinks = torch.full((1,), -torch.inf, dtype=dtype) if tensors.sinks is None else tensors.sinks
    joined = torch.cat([scores.masked_fill(~allowed, lowest), sinks[:, None, None].expand(*scores.shape[:3], 1)], -1)
    weights = torch.softmax(joined, -1)[..., :-1].masked_fill(~allowed, 0)
    out = weights @ values
    found = {"out": out, "lse": joined.masked_fill(joined == lowest, -torch.inf).logsumexp(-1)}
    if case.needs_grad:
        found |= gradients_of(out, tensors, case)
    return {name: tensor.detach().double() for name, tensor in found.items()}


@lru_cache(maxsize=1)
def correct_and_rounded(case: Case) -> tuple[Results, Results]:
    """Return what is correct, and what plain attention in the case's dtype makes of it: once for several backends."""
    return results(case, reference, torch.float64), plain_attention(case, case.dtype)


def check(case: Case, backend: Backend, device: str = "cpu") -> None:
    """Assert that a backend is as near to float64 as plain low-precision attention, up to a small factor."""
    expected, rounded = correct_and_rounded(case)
    found = results(case, backend, case.dtype, device)
    assert found.keys() == expected.keys()
    tensors = tensors_of(case, torch.float64)
    # numbers of this size cancel in the gradient of a score, in float32 at least
    inner = (
        case.score_factor * SCALE * (tensors.grad_out.abs().amax((0, 1, 2)) @ tensors.v.abs().amax((0, 1, 2))).item()
    )
    for name, correct in expected.items():
        finite = correct.isfinite()
        assert torch.equal(found[name].isneginf(), correct.isneginf()), f"{backend.NAME}, {name}: rows without keys"
        if finite.any():
            error, typical = ((each[name] - correct)[finite].abs().max().item() for each in (found, rounded))
            last_digit = torch.finfo(case.dtype).eps * correct[finite].abs().max().item()
            allowed = 4 * (typical + last_digit + torch.finfo(torch.float32).eps * inner)
            assert error <= allowed, f"{backend.NAME}, {name}: off by {error:.2e}, {allowed:.2e} is allowed"


def pairwise_cases() -> list[Case]:
    """Return cases in which every pattern meets every length, mask, dtype and number of heads, and not all at once."""
    cases = []
    for number, pattern in enumerate(PATTERNS):
        for turn, num_keys in enumerate(LENGTHS):
            mask = MASKS[(number + turn) % len(MASKS)]
            dtype = DTYPES[(number + 2 * turn + turn // 3) % len(DTYPES)]
            cases.append(Case(pattern, num_keys, mask, dtype, HEADS[(number // 2 + turn) % len(HEADS)]))
    return cases


def memory_cases() -> list[Case]:
    """Return every memory order of each of q, k, v and the gradient of the output, and gradients of some of them."""
    masks, patterns = ("none", "holes", "none", "documents"), ("full", "band", "dilated", "random", "causal")
    cases = []
    for number, name in enumerate(MEMORY):
        for place in range(4):
            memory = tuple(name if index == place else "plain" for index in range(4))
            pattern, dtype = patterns[(number + place) % len(patterns)], DTYPES[(number + 2 * place) % len(DTYPES)]
            cases.append(Case(pattern, 10 if number % 2 else 90, masks[place], dtype, memory=memory))
        cases.append(
            Case("band", 90, "holes", num_queries=1 + number, memory=(name, name, "plain", name), label=Distance(-3, 6))
        )
    cases += [Case("globals", 90, mask, learned=learned) for mask in masks[:2] for learned in ((0,), (1,), (2,))]
    cases += [Case("globals", 90, label=Distance(-3, 6), learned=learned) for learned in ((3,), (0, 3), (1,))]
    return cases


def huge_score_cases() -> list[Case]:
    """Return scores beyond what can be exponentiated, of masked tokens too."""
    patterns = ("full", "band", "dilated", "random", "earlier keys", "keyless blocks")
    return [
        *(Case(pattern, 90, "holes", DTYPES[i % 3], score_factor=100) for i, pattern in enumerate(patterns)),
        *(Case(pattern, 90, "holes", score_factor=100, label=SOFT_SPAN) for pattern in ("band", "earlier keys")),
        Case("band", 90, "documents", score_factor=1000, value_dim=24),
        Case("causal", 90, "left", torch.float16, score_factor=100, num_queries=40),
    ]


def special_cases() -> list[Case]:
    """Return cached decoding, learned terms, values of another width."""
    clipped = Distance(-3, 6)
    return [
        *(Case(pattern, 200, mask, num_queries=1) for pattern in PATTERNS for mask in ("none", "left")),
        *(Case(pattern, 200, mask, num_queries=70) for pattern in PATTERNS for mask in ("none", "documents")),
        *(Case(pattern, 90, mask, label=clipped) for pattern in PATTERNS for mask in ("none", "documents")),
        *(Case(pattern, 90, mask, label=SOFT_SPAN) for pattern in PATTERNS for mask in ("none", "holes")),
        *(Case(pattern, 90, label=SOFT_SPAN, has_own_values=True) for pattern in PATTERNS),
        Case("causal band", 300, "documents", label=SOFT_SPAN, num_queries=150, has_own_values=True),
        Case("causal", 300, "left", torch.bfloat16, label=SOFT_SPAN, has_own_values=True),
        Case("band", 300, dtype=torch.float16, label=SOFT_SPAN),
        Case("globals", 90, "documents", label=clipped, has_own_values=True),
        Case("globals", 90, "holes", torch.bfloat16, label=clipped),
        Case("causal", 90, "left", torch.float16, num_queries=40, label=clipped),
        Case("globals", 90, "right", value_dim=24),
        *(Case(pattern, 90, mask, has_sinks=True) for pattern in PATTERNS for mask in ("none", "holes")),
        *(Case("causal band", 200, "left", dtype, has_sinks=True, num_queries=70) for dtype in DTYPES),
        *(Case(pattern, 90, mask, softcap=1.5) for pattern in ("full", "dilated", "globals") for mask in MASKS[:2]),
        Case("earlier keys", 90, "documents", torch.bfloat16, has_sinks=True, softcap=2.0, label=clipped),
        Case("causal", 90, "left", has_sinks=True, softcap=1.0, label=SOFT_SPAN),
        *(Case(pattern, 90, "left", needs_grad=False, has_sinks=True) for pattern in ("full", "causal", "globals")),
        Case("causal", 90, needs_grad=False, has_sinks=True, num_queries=1),
        *(Case(pattern, 90, scale=scale) for pattern in ("full", "causal", "band") for scale in (-0.5, 0.0)),
        Case("causal", 90, value_dim=8),
        Case(SPAN_TREE, TREE_POSITIONS),
        Case(SPAN_TREE, TREE_POSITIONS, label=SpanRelation(TREE_TOKENS, 2, clip_distance=3)),
    ]


def cross_cases() -> list[Case]:
    """Return queries on an axis of their own, shorter and longer than that of the keys, and in the middle of it."""
    patterns = [name for name, pattern in PATTERNS.items() if not pattern.depends_on_length]
    places = ((90, 40, 0), (40, 90, 0), (1, 70, 60), (200, 12, 3))
    masks = ("none", "left", "right", "holes", "documents")
    return [
        *(
            Case(
                pattern,
                num_keys,
                masks[(number + turn) % 5],
                DTYPES[turn % 3],
                (4, 2),
                num_queries,
                cross_offset=offset,
            )
            for number, pattern in enumerate(patterns)
            for turn, (num_queries, num_keys, offset) in enumerate(places)
        ),
        Case("band", 40, "documents", num_queries=90, label=Distance(-3, 6), has_own_values=True, cross_offset=0),
        Case("full", 12, "left", num_queries=90, has_sinks=True, softcap=2.0, cross_offset=5),
        Case("compressed keys", 20, "documents", num_queries=90, label=SOFT_SPAN, value_dim=24, cross_offset=0),
    ]
