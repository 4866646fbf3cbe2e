"""LSH attention by its definition: one document and head at a time, all pairs in memory, in float64."""

from typing import Any

import torch
from torch import Tensor


def read_counts(buckets: Tensor, config: Any) -> Tensor:
    """Return how often each token reads each, itself included: [tokens, tokens], from the buckets [rounds, tokens]."""
    rounds, tokens = buckets.shape
    size, before, after = config.lsh_attn_chunk_length, config.lsh_num_chunks_before, config.lsh_num_chunks_after
    counts = torch.zeros(tokens, tokens, dtype=torch.float64)
    if config.chunk_by_bucket:
        for of_round in buckets:
            shares = of_round[:, None] == of_round
            chunk = shares.tril(-1).sum(1) // size
            steps = chunk - chunk[:, None]
            counts += shares & (-before <= steps) & (steps <= after)
    else:
        place = buckets.argsort(stable=True).argsort()
        chunks = -(-tokens // size)
        # of every token in every round, on the ring
        number = place // size + chunks * torch.arange(rounds)[:, None]
        shares = (buckets[:, None, :, None] == buckets[None, :, None]) & torch.eye(rounds).bool()[..., None, None]
        for step in range(-before, after + 1) if chunks > 1 else [0]:
            meets = (number[:, None, :, None] + step) % (rounds * chunks) == number[None, :, None]
            counts += (meets & (shares | config.attend_across_buckets)).sum((0, 1))
    counts = counts if config.count_duplicates else counts.clamp(max=1)
    return counts.tril() if config.is_causal else counts


def attend(query: Tensor, value: Tensor, counts: Tensor) -> Tensor:
    """Return the output [tokens, D] of one head, in float64."""
    key = query * (query.square().mean(-1, keepdim=True) + 1e-6).rsqrt() / query.shape[-1] ** 0.5
    others = counts * (1 - torch.eye(len(counts), dtype=torch.float64))
    counts = torch.where(others.sum(-1, keepdim=True) > 0, others, counts)
    scores = query @ key.T + counts.log()
    return torch.softmax(scores, -1) @ value
