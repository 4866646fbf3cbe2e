"""Attention to all keys of the own segment, where queries and keys are different tokens: sentences and translations."""

from typing import Any, cast

from torch import Tensor, compiler

from hf_efficient_attn.attention.functional import attention
from hf_efficient_attn.attention.select import AUTO, preferred_backend
from hf_efficient_attn.backends.blocked import backend as blocked
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.patterns.bands import Full

# what `blocked` takes on CPUs, where a score of dense attention with a mask takes its width and SCORE_WIDTH more: for a
# document, and for each pair of it as many times as much
WORK_PER_DOCUMENT, SCORE_WIDTH, TIMES_A_SCORE = 5_000_000, 16, 1.5


def attend_own_segments(
    query: Tensor, key: Tensor, value: Tensor, tokens: TokenMask, scale: float, dropout: float, backend: str
) -> Tensor:
    """Return the output [B, H, T, Dv] of queries that read the keys with the number of their own segment.

    Args:
        query: [B, H, T, D].
        key, value: [B, H, S, ·].
        tokens: segments of both, and which keys are tokens.
        backend: as for `attention`.
    """
    # it estimates costs without looking at documents
    if backend == AUTO and preferred_backend() == AUTO and do_documents_pay(query, key, tokens):
        backend = blocked.NAME
    options: dict[str, Any] = {"dropout": dropout, "backend": backend, "cross": True}
    masks = tokens.key_mask, tokens.segment_ids
    of_queries = tokens.query_segment_ids
    out = attention(query, key, value, Full(), scale, *masks, query_segment_ids=of_queries, **options)
    return cast(Tensor, out)


def do_documents_pay(query: Tensor, key: Tensor, tokens: TokenMask) -> bool:
    """Return whether documents one by one are computed sooner than all pairs under a mask; known on CPUs alone."""
    batch_size, num_heads, num_queries = query.shape[:3]
    # dense attention reads the keys between the first and the last of a single query by itself
    if compiler.is_compiling() or query.device.type != "cpu" or num_queries == 1:
        return False
    num_keys = key.shape[2]
    found = [each for row in tokens.documents(batch_size, num_keys, num_queries) for each in row]
    num_pairs = sum((each.stop - each.start) * (each.queries[1] - each.queries[0]) for each in found if each.queries)
    num_scores, width = batch_size * num_heads * num_queries * num_keys, query.shape[3] + SCORE_WIDTH
    return WORK_PER_DOCUMENT * len(found) + TIMES_A_SCORE * num_heads * num_pairs * width < num_scores * width
