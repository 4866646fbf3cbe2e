"""The calls under the contract of a backend: patterns, masks and tensors. A pattern joins by a line in `PATTERNS`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from chosen_choices import CHOICES, Sizes
from torch import Tensor

from hf_efficient_attn.layout.call import AttentionCall, Inputs
from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.layout.score_terms import Label, Term
from hf_efficient_attn.layout.selected_keys import ChosenKeys
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.patterns.algebra import PerHead
from hf_efficient_attn.patterns.bands import Band, Causal, CompressedKeys, Dilated, Full
from hf_efficient_attn.patterns.big_bird import bigbird
from hf_efficient_attn.patterns.blocks import BlockLocal
from hf_efficient_attn.patterns.global_tokens import GlobalTokens
from hf_efficient_attn.patterns.grid import Grid, SizedGrid
from hf_efficient_attn.patterns.interleaved_span_tree import InterleavedSpanTree
from hf_efficient_attn.patterns.pattern import Pattern
from hf_efficient_attn.patterns.span_tree import SpanTree
from hf_efficient_attn.patterns.tables import GatheredKeys, KeyTable

BATCH_SIZE = 2
# of their gradient, beside those of q, k, v and a term
NUMBER_OF_SINKS = 9
HEAD_DIM = 16
SCALE = 0.3
SEED = 7
SHORTEST_SPAN = 4.5

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
    "gathered keys": GatheredKeys(Band(20, 7) | GlobalTokens([1]), [(0, 3), (9, 40), (60, 300)]),
    "interleaved tree": InterleavedSpanTree(3, left_only=True),
    "key table": KeyTable([{query, query // 2, *range(query * 7 % 5, query % 40)} for query in range(700)]),
    "per head": PerHead([Band(5, 5), Dilated(12, 0, 3)]),
    "grid": SizedGrid([8, 8], [Band(1, 1), Dilated(2, 4, 2)], 1),
    "scattered globals": Band(8, 2) | GlobalTokens([7, 31, 32, 60]),
}
# its positions are the nodes of a tree, so that few lengths are possible
SPAN_TREE = "span tree"
BOTH_SIDES = "interleaved tree on both sides"
# it has to fit the input: 101 tokens
GRID = "whole grid"
# for numbers of heads that three divides
THREE_PATTERNS = "three patterns"
MORE_PATTERNS: dict[str, Pattern] = {
    SPAN_TREE: SpanTree(2),
    BOTH_SIDES: InterleavedSpanTree(2),
    GRID: Grid([10, 10], [Band(2, 2), Band(1, 3)], 1, "shifted"),
    THREE_PATTERNS: PerHead([Band(2, 0), bigbird(4, 1, plan="authors"), Causal()]) | Dilated(9, 9, 3),
}
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


def token_mask(name: str, num_keys: int) -> TokenMask:
    """Return a mask of one kind; the examples differ, and under "holes" the second has no token at all."""
    index = torch.arange(num_keys).expand(BATCH_SIZE, -1)
    example = torch.arange(BATCH_SIZE)[:, None]
    padding = (num_keys * (1 + example)) // 5
    masks = {
        "left": TokenMask(key_mask=index >= padding),
        "right": TokenMask(key_mask=index < num_keys - padding),
        "holes": TokenMask(key_mask=(index % 7 != 3) & (index >= 2) & (example == 0)),
        "documents": TokenMask(
            segment_ids=far_apart(index // (3 + num_keys // (3 + example))), key_mask=index % 50 != 1
        ),
        "globals": TokenMask(index < num_keys - padding, global_mask=index % (11 + num_keys // 2) == 4 + example),
        "two texts": two_texts(num_keys),
    }
    return masks.get(name, TokenMask())


def two_texts(num_keys: int) -> TokenMask:
    """Return two documents of equal length in each example, after and before masked tokens, six in all."""
    tokens = num_keys // 2 - 3
    index, first = torch.arange(num_keys).expand(BATCH_SIZE, -1), 1 + torch.arange(BATCH_SIZE)[:, None]
    is_token = (index >= first) & (index < first + 2 * tokens)
    return TokenMask(is_token, segment_ids=(index >= first + tokens).long())


def far_apart(numbers: Tensor) -> Tensor:
    """Return ids whose differences overflow: 0, 1, 2, 3 become the largest integer, the smallest, and those inside."""
    return torch.where(numbers % 2 == 0, 2**63 - 1 - numbers, numbers - 1 - 2**63)


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
        cross_offset: position of the first query on an axis of its own; None: the queries are the last positions, on
            the axis of the keys if the pattern allows that.
        label: of a learned term; None: there is no term.
        has_own_values: every query of every example has values of its own; else they are those of a head.
        memory: of q, k, v and the gradient of the output, names of `MEMORY`.
        learned: which of q, k, v and the values of the term require gradients.
        score_factor: multiplies q; from about 50 on, e to the power of a score is infinite.
        has_sinks: every head has a sink, which requires a gradient; the first head's has no weight, being -inf.
        softcap: bound of the scores.
        choice: of keys, a name in `CHOICES`; "": there is none.
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
    choice: str = ""

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
            self.choice,
        )
        return ", ".join(str(part) for part in parts + tuple(part for part in extra if part))

    @property
    def layout(self) -> Layout:
        """The layout."""
        num_queries, pattern = self.num_queries or self.num_keys, (PATTERNS | MORE_PATTERNS)[self.pattern]
        is_cross = self.cross_offset is not None or pattern.needs_two_axes
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
            chosen=self.chosen(device),
        )

    def chosen(self, device: str = "cpu") -> ChosenKeys | None:
        """The chosen keys."""
        if not self.choice:
            return None
        layout = self.layout
        sizes = Sizes(BATCH_SIZE, *self.heads, layout.num_queries, layout.num_keys)
        made = CHOICES[self.choice](sizes)
        moved = {name: getattr(made, name) for name in made.tensor_names}
        return replace(made, **{name: each if each is None else each.to(device) for name, each in moved.items()})


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
