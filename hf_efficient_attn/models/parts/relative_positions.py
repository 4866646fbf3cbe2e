"""Relative sinusoidal positions of Transformer-XL, for plain and dilated windows.

The score of query i and key j is (q_i + u)·k_j + (q_i + v)·W_r·R(i − j), with trained vectors u and v per head and the
sinusoids R. Source: Dai et al. (arXiv:1901.02860), section 3.3; Beltagy et al. (arXiv:2004.05150), section 4.1, use
them in the character language model.
"""

from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init

from hf_efficient_attn.layout.score_terms import Distance, Term
from hf_efficient_attn.models.parts.embeddings import sinusoids
from hf_efficient_attn.patterns.pattern import Pattern

# a model is compiled separately for each of these lengths
COMPILED_KEYS = tuple(4**power for power in range(4, 12))


@dataclass(frozen=True)
class ReachGroup:
    """Adjacent heads with equal patterns, and the distances query − key that they need."""

    heads: slice
    pattern: Pattern
    reach: Distance


class RelativePositions(nn.Module):
    """Return the queries to multiply with the keys, and for each group of heads the term of its distances.

    Shapes: query [B, H, T, D] → the same, terms of [B, heads of the group, T, distances].
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.hidden_size, self.std = config.hidden_size, config.initializer_range
        self.max_distance = config.max_position_embeddings
        self.r_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        head_vectors = (config.num_attention_heads, 1, config.hidden_size // config.num_attention_heads)
        self.content_bias = nn.Parameter(torch.zeros(head_vectors))
        self.position_bias = nn.Parameter(torch.zeros(head_vectors))

    def initialize(self) -> None:
        """Initialise u and v like every matrix, as Transformer-XL does."""
        init.normal_(self.content_bias, std=self.std)
        init.normal_(self.position_bias, std=self.std)

    def forward(
        self, query: Tensor, groups: tuple[ReachGroup, ...], num_keys: int, scale: float
    ) -> tuple[Tensor, list[Term]]:
        reaches = [within(group.reach, num_keys) for group in groups]
        first, last = min(reach.first for reach in reaches), max(reach.last for reach in reaches)
        distances = torch.arange(first, last + 1, device=query.device)
        table = self.r_proj(sinusoids(distances, self.hidden_size).to(query.dtype))
        table = table.unflatten(-1, self.content_bias.shape[::2]).permute(1, 2, 0)
        # the queries are scaled, not their product with the table, which is much larger
        scaled = (query + self.position_bias) * scale
        terms = []
        for group, reach in zip(groups, reaches, strict=True):
            columns = slice(reach.first - first, reach.last + 1 - first)
            terms.append(Term(scaled[:, group.heads] @ table[group.heads, :, columns], reach))
        return query + self.content_bias, terms


def within(reach: Distance, num_keys: int) -> Distance:
    """Return a reach without the distances that do not occur among `num_keys` keys.

    A compiled model, whose lengths may be symbolic, rounds `num_keys` up to one of a few values; an exported model
    keeps the whole reach.

    >>> within(Distance(-9, 9), 4), within(Distance(0, 9), 4)
    (Distance(first=-3, last=3), Distance(first=0, last=3))
    """
    if torch.compiler.is_exporting():
        return reach
    if torch.compiler.is_compiling():
        num_keys = next((limit for limit in COMPILED_KEYS if num_keys <= limit), COMPILED_KEYS[-1])
    first = min(reach.last, max(reach.first, 1 - num_keys))
    return Distance(first, max(first, min(reach.last, num_keys - 1)))


def reach_groups(pattern: Pattern, max_distance: int, num_heads: int) -> tuple[ReachGroup, ...]:
    """Return groups of adjacent heads with equal patterns, and their distances; a random pattern makes one group.

    >>> from hf_efficient_attn.patterns.bands import Band, Dilated
    >>> from hf_efficient_attn.patterns.algebra import PerHead
    >>> [group.heads for group in reach_groups(PerHead([Band(8, 0), Dilated(9, 9, 3)]), 64, 4)]
    [slice(0, 2, None), slice(2, 4, None)]
    """
    if pattern.is_random:
        return (ReachGroup(slice(0, num_heads), pattern, reach_of(pattern, max_distance, num_heads)),)
    groups, start = [], 0
    for head, run in groupby(pattern.heads(num_heads)):
        stop = start + len(list(run))
        groups.append(ReachGroup(slice(start, stop), head, reach_of(head, max_distance, 1)))
        start = stop
    return tuple(groups)


def reach_of(pattern: Pattern, max_distance: int, num_heads: int) -> Distance:
    """Return the distances query − key that a pattern needs, no further than `max_distance` tokens either way.

    >>> from hf_efficient_attn.patterns.bands import Band, Dilated
    >>> reach_of(Band(8, 0), 64, 1), reach_of(Dilated(9, 9, 3), 64, 1)
    (Distance(first=0, last=8), Distance(first=-9, last=9))
    """
    heads = {head.resolve(4 * max_distance) for head in pattern.heads(num_heads)}
    intervals = [
        (query, interval)
        for head in heads
        for query in _probes(head, max_distance)
        for interval in head.key_intervals(query, query, 4 * max_distance)
    ]
    first = max(-max_distance, min((query - stop + 1 for query, (_, stop) in intervals), default=0))
    last = min(max_distance, max((query - start for query, (start, _) in intervals), default=0))
    return Distance(min(first, last), max(first, last))


def _probes(pattern: Pattern, max_distance: int) -> range:
    """Return queries in the middle of a sequence, enough of them to cover one period of the pattern."""
    period = pattern.period
    return range(2 * max_distance, 2 * max_distance + (max_distance if period is None else min(period, max_distance)))
