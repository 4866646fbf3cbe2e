"""Brute force: the relation of a pattern as a set of pairs, from `allowed` on integers alone."""

from hf_efficient_attn.patterns import Pattern
from hf_efficient_attn.patterns.intervals import Intervals

Pairs = set[tuple[int, int]]


def pairs_of(pattern: Pattern, num_queries: int, num_keys: int, query_offset: int = 0) -> Pairs:
    """Return all allowed pairs (query, key)."""
    queries = range(query_offset, query_offset + num_queries)
    return {(query, key) for query in queries for key in range(num_keys) if pattern.allowed(query, key)}


def rows_of(pattern: Pattern, first_query: int, last_query: int, num_keys: int) -> list[set[int]]:
    """Return the keys of each query of first_query..last_query."""
    return [
        {key for key in range(num_keys) if pattern.allowed(query, key)} for query in range(first_query, last_query + 1)
    ]


def keys_of(intervals: Intervals) -> set[int]:
    """Return the positions that lie in `intervals`."""
    return {key for start, stop in intervals for key in range(start, stop)}
