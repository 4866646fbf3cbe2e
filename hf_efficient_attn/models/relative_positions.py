"""Relative sinusoidal positions of Transformer-XL, for windows, dilated ones included.

The score of query i and key j is (q_i + u)·k_j + (q_i + v)·W_r·R(i − j), with trained vectors u and v per head and the
sinusoids R. Source: Dai et al. (arXiv:1901.02860), section 3.3; Beltagy et al. (arXiv:2004.05150), section 4.1, use
them in the character language model.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init

from hf_efficient_attn.layout.terms import Distance, Term
from hf_efficient_attn.models.positions import sinusoids
from hf_efficient_attn.patterns.pattern import Pattern


class RelativePositions(nn.Module):
    """Return the queries for the keys, and the term of the distances. Shapes: query [B, H, T, D] → the same, a `Term`.

    Distances further than the pattern reaches (global tokens) are clipped to its reach.
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
        """Start u and v as every matrix starts, as Transformer-XL does."""
        init.normal_(self.content_bias, std=self.std)
        init.normal_(self.position_bias, std=self.std)

    def forward(self, query: Tensor, reach: Distance, scale: float) -> tuple[Tensor, Term]:
        distances = torch.arange(reach.first, reach.last + 1, device=query.device)
        table = self.r_proj(sinusoids(distances, self.hidden_size).to(query.dtype))
        table = table.unflatten(-1, self.content_bias.shape[::2]).transpose(0, 1)
        values = (query + self.position_bias) @ table.transpose(1, 2) * scale
        return query + self.content_bias, Term(values, reach)


def reach_of(pattern: Pattern, max_distance: int, num_heads: int) -> Distance:
    """Return the distances query − key that a pattern needs, no further than `max_distance` tokens either way.

    >>> from hf_efficient_attn.patterns.bands import Band, Dilated
    >>> reach_of(Band(8, 0), 64, 1), reach_of(Dilated(9, 9, 3), 64, 1)
    (Distance(first=0, last=8), Distance(first=-9, last=9))
    """
    heads = {head.resolve(4 * max_distance) for head in pattern.heads(num_heads)}
    spans = [
        (query, span)
        for head in heads
        for query in _probes(head, max_distance)
        for span in head.key_spans(query, query, 4 * max_distance)
    ]
    first = max(-max_distance, min((query - stop + 1 for query, (_, stop) in spans), default=0))
    last = min(max_distance, max((query - start for query, (start, _) in spans), default=0))
    return Distance(min(first, last), max(first, last))


def _probes(pattern: Pattern, max_distance: int) -> range:
    """Return queries in the middle of a sequence, as many as show everything that repeats."""
    period = pattern.period
    return range(2 * max_distance, 2 * max_distance + (max_distance if period is None else min(period, max_distance)))
