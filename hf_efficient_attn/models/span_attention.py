"""Attention in which every head reads only as far as its span: computed, not only masked.

Heads whose spans end in the same granule are computed together; each group reads a band as wide as its own heads need,
through the kernels that serve any pattern. Within the span nothing is added to the scores, so only the keys around the
ramp pass through the slower kernel that knows learned terms.
"""

from dataclasses import dataclass
from math import ceil, floor

import torch
from torch import Tensor

from hf_efficient_attn.attention.layer_attention import attend_layer
from hf_efficient_attn.attention.layer_patterns import LayerPattern
from hf_efficient_attn.attention.select import AUTO
from hf_efficient_attn.layout.terms import Distance, Ramp, Term
from hf_efficient_attn.models.spans import log_soft_mask
from hf_efficient_attn.patterns.bands import Band
from hf_efficient_attn.patterns.pattern import Pattern

# spans are rounded outwards to so many tokens, so that few layouts are compiled while they move
GRANULE = 32
# with fewer queries, as in decoding, a call costs more than the keys it saves
FEW_QUERIES = 8


@dataclass(frozen=True)
class SpanWindow:
    """Which keys exist for a head: `limit` of them, counted from the nearest.

    Attributes:
        limit, ramp: S and R, in tokens.
        include_self: the nearest key is the query itself; else the one before it.
        is_causal: only keys before the query; else as many after it.
    """

    limit: int
    ramp: int
    include_self: bool
    is_causal: bool

    @property
    def shift(self) -> int:
        """The distance of the nearest key."""
        return 0 if self.include_self else 1

    def num_keys(self, span: float) -> int:
        """Return how many keys a head of this span gives any weight, on one side."""
        return min(self.limit, ceil(span) + self.ramp)

    def band(self, num_keys: int) -> Pattern:
        """Return the band of the nearest `num_keys` keys."""
        left = num_keys - 1 + self.shift
        return Band(left, -self.shift if self.is_causal else left)


@dataclass(frozen=True)
class HeadGroup:
    """Heads that are computed together.

    Attributes:
        heads: their indices.
        num_inner: so many of the nearest keys have weight 1 in all of them.
        num_keys: so many can have any weight.
    """

    heads: tuple[int, ...]
    num_inner: int
    num_keys: int


def head_groups(lowest: list[float], highest: list[float], window: SpanWindow, num_queries: int) -> list[HeadGroup]:
    """Return the heads with spans between `lowest` and `highest`, by how far they read, in granules.

    >>> window = SpanWindow(limit=1024, ramp=32, include_self=False, is_causal=True)
    >>> head_groups([0.0, 500.0, 3.0], [0.0, 500.0, 3.0], window, 1024)
    [HeadGroup(heads=(0,), num_inner=1, num_keys=32), HeadGroup(heads=(2,), num_inner=1, num_keys=64), \
HeadGroup(heads=(1,), num_inner=481, num_keys=544)]
    """

    def reach(head: int) -> tuple[int, int]:
        first = floor(max(lowest[head], 0.0)) // GRANULE * GRANULE
        num_keys = min(window.limit, ceil(window.num_keys(highest[head]) / GRANULE) * GRANULE)
        # at the limit the ramp lies beyond all keys
        return (num_keys, num_keys) if lowest[head] >= window.limit else (num_keys, min(first + 1, num_keys))

    members: dict[tuple[int, int], list[int]] = {}
    for head in range(len(lowest)):
        members.setdefault(reach(head), []).append(head)
    groups = [HeadGroup(tuple(members[key]), key[1], key[0]) for key in sorted(members)]
    return groups if num_queries > FEW_QUERIES else merge_groups(groups)


def merge_groups(groups: list[HeadGroup]) -> list[HeadGroup]:
    """Return fewer groups, in each of which no head reads more than twice what it needs.

    >>> merge_groups([HeadGroup((0,), 1, 64), HeadGroup((2,), 33, 96), HeadGroup((1,), 481, 544)])
    [HeadGroup(heads=(0, 2), num_inner=1, num_keys=96), HeadGroup(heads=(1,), num_inner=481, num_keys=544)]
    """
    merged: list[HeadGroup] = []
    for group in groups:
        if merged and group.num_keys <= 2 * merged[-1].num_keys:
            last = merged.pop()
            heads = tuple(sorted((*last.heads, *group.heads)))
            group = HeadGroup(heads, min(last.num_inner, group.num_inner), group.num_keys)
        merged.append(group)
    return merged


def attend_spans(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: Tensor | None,
    window: SpanWindow,
    attention_mask: Tensor | None,
    scale: float,
    dropout: float = 0.0,
    position_table: Tensor | None = None,
    known_spans: tuple[float, ...] | None = None,
    layer_idx: int = 0,
    need_weights: bool = False,
    backend: str = AUTO,
) -> tuple[Tensor, Tensor | None]:
    """Return the output [B, T, H, D] and the weights [B, H, T, K] or None.

    Args:
        query: [B, H, T, D]; the queries are the last of the K positions.
        key, value: [B, H, K, D].
        spans: tokens, [1, H, 1] or [B, H, T]; None: every head reads all of the limit.
        attention_mask: a token table, a matrix that a user gave, or None.
        position_table: [limit, D], a vector a distance, from the nearest key on, that is added to the keys.
        known_spans: the spans as numbers, where they are no parameters.
        need_weights: compute densely, and return the weights.
    """
    groups = groups_of(spans, known_spans, window, query)
    outputs, weights = [], []
    for group in groups:
        heads = list(group.heads)
        is_all = len(heads) == query.shape[1]
        q, k, v = (query, key, value) if is_all else (each[:, heads] for each in (query, key, value))
        own = spans if spans is None or is_all else spans[:, heads]
        out, weight = attend_layer(
            q,
            k,
            v,
            LayerPattern(window.band(group.num_keys), layer_idx, is_own=False, is_causal=window.is_causal),
            attention_mask,
            scale,
            dropout,
            terms=terms_of(q, own, window, group, position_table, scale),
            need_weights=need_weights,
            backend=backend,
        )
        outputs.append(out)
        weights.append(weight)
    if len(groups) == 1:
        return outputs[0], weights[0]
    order = torch.tensor([head for group in groups for head in group.heads], device=query.device).argsort()
    out = torch.cat(outputs, 2).index_select(2, order)
    return out, torch.cat(weights, 1).index_select(1, order) if need_weights else None  # type: ignore[arg-type]


def groups_of(
    spans: Tensor | None, known_spans: tuple[float, ...] | None, window: SpanWindow, query: Tensor
) -> list[HeadGroup]:
    """Return the groups of a call; a compiler, which knows no learned span, gets one of all heads and all keys."""
    heads = tuple(range(query.shape[1]))
    if spans is None:
        return [HeadGroup(heads, window.limit, window.limit)]
    if known_spans is not None:
        return head_groups(list(known_spans), list(known_spans), window, FEW_QUERIES + 1)
    if torch.compiler.is_compiling():
        return [HeadGroup(heads, 1, window.limit)]
    per_head = spans.detach().transpose(0, 1).flatten(1)
    lowest, highest = torch.stack((per_head.amin(1), per_head.amax(1))).tolist()
    return head_groups(lowest, highest, window, query.shape[2])


def terms_of(
    query: Tensor,
    spans: Tensor | None,
    window: SpanWindow,
    group: HeadGroup,
    position_table: Tensor | None,
    scale: float,
) -> tuple[Term, ...]:
    """Return what is added to the scores of a group: the scores of the distances, and the logarithm of the mask."""
    has_ramp = spans is not None and group.num_inner < group.num_keys
    if position_table is None:
        if not has_ramp:
            return ()
        first = group.num_inner - 1
        values = log_soft_mask(spans, first, group.num_keys - first, window.ramp)
        return (Term(values, Ramp(first + window.shift, group.num_keys - 1 - first)),)
    values = query @ position_table[: group.num_keys].to(query.dtype).T * scale
    if has_ramp:
        values = values + log_soft_mask(spans, 0, group.num_keys, window.ramp)
    return (Term(values, Distance(window.shift, group.num_keys - 1 + window.shift)),)
