"""LSH attention by its definition: one text and head at a time, loops over chunks, all pairs in memory."""

import torch
from torch import Tensor


def read_counts(
    buckets: Tensor, chunk_tokens: int, before: int, after: int, is_causal: bool, across: bool = True
) -> Tensor:
    """Return how often each query reads each key, itself included: [tokens, tokens], from buckets [rounds, tokens]."""
    rounds, tokens = buckets.shape
    chunks: list[list[tuple[int, int]]] = []
    for number in range(rounds):
        order = sorted(range(tokens), key=lambda token, number=number: (int(buckets[number, token]), token))
        listed = [(token, int(buckets[number, token])) for token in order]
        chunks += [listed[start : start + chunk_tokens] for start in range(0, tokens, chunk_tokens)]
    counts = torch.zeros(tokens, tokens, dtype=torch.float64)
    for index, chunk in enumerate(chunks):
        steps = [0] if tokens <= chunk_tokens else range(-before, after + 1)
        read = [pair for step in steps for pair in chunks[(index + step) % len(chunks)]]
        for query, own in chunk:
            for key, other in read:
                counts[query, key] += across or own == other
    return counts.tril() if is_causal else counts


def counts_by_bucket(buckets: Tensor, chunk_tokens: int, is_causal: bool) -> Tensor:
    """Return the same for chunks that begin anew with every bucket and read the one before."""
    tokens = buckets.shape[1]
    counts = torch.zeros(tokens, tokens, dtype=torch.float64)
    for row in buckets.tolist():
        ranks = [sum(other == own for other in row[:token]) // chunk_tokens for token, own in enumerate(row)]
        for query in range(tokens):
            for key in range(tokens):
                is_read = row[query] == row[key] and 0 <= ranks[query] - ranks[key] <= 1
                counts[query, key] += is_read
    return counts.tril() if is_causal else counts


def attend(query: Tensor, value: Tensor, counts: Tensor) -> Tensor:
    """Return the output [tokens, D] of one head, in float64."""
    key = query * (query.square().mean(-1, keepdim=True) + 1e-6).rsqrt() / query.shape[-1] ** 0.5
    others = counts * (1 - torch.eye(len(counts), dtype=torch.float64))
    counts = torch.where(others.sum(-1, keepdim=True) > 0, others, counts)
    scores = query @ key.T + counts.log()
    return torch.softmax(scores, -1) @ value
