"""The attention of routing heads in the groups of their clusters, and the terms that count places of these groups."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init

from hf_efficient_attn.attention.call import build_call
from hf_efficient_attn.attention.dense_matrix import check_matrix
from hf_efficient_attn.attention.key_tokens import QueryOffset
from hf_efficient_attn.attention.layer_attention import (
    NEVER_READ,
    added_scores,
    attend_layer,
    pairs_of,
    readable_keys,
    tokens_of_layer,
)
from hf_efficient_attn.attention.layer_patterns import LayerPattern
from hf_efficient_attn.attention.select import AUTO
from hf_efficient_attn.attention.weight_rows import rows_or_all
from hf_efficient_attn.layout.grouped_keys import KeyGroups
from hf_efficient_attn.layout.grouped_reference import in_groups
from hf_efficient_attn.layout.score_terms import Distance, Term
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.layout.tracing import autocast_off

from .membership import ClusterGroups

# each group has a softmax of its own, for which torch's SDPA has no mask: dense is the formula
DENSE = {"sdpa": "reference"}


class DistanceVectors(nn.Module):
    """A trained vector per distance, added to the keys of all heads; those beyond the last share the last one.

    Distances are query - key, from 0 on in causal heads. Source: Shaw et al. (arXiv:1803.02155); the authors of the
    Routing Transformer also add vectors to the values, which we leave out.

    Reads from the config: `max_relative_distance`, `is_causal`, `head_dim`, `initializer_range`.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.last, self.std = config.max_relative_distance, config.initializer_range
        self.first = 0 if config.is_causal else -self.last
        self.weight = nn.Parameter(torch.zeros(self.last - self.first + 1, config.head_dim))

    def initialize(self) -> None:
        init.normal_(self.weight, std=self.std)

    def forward(self, query: Tensor, scale: float) -> Tensor:
        """Return what is added to the scores of queries [B, H, T, D] at each distance.

        A tensor, in which DeepSpeed finds the module whose weight the backward pass needs again.
        """
        return (query * scale) @ self.weight.to(query.dtype).T

    def term(self, query: Tensor, scale: float, shift: int = 0) -> Term:
        """Return the term of queries; `shift`: by how much labels count a distance too low."""
        return Term(self(query, scale), Distance(self.first - shift, self.last - shift))


def key_groups(groups: ClusterGroups, takes_mean: bool, has_distances: bool) -> KeyGroups:
    """Return the groups for the engine.

    Args:
        takes_mean: a token may be in several clusters.
        has_distances: there is a term, whose labels count places.
    """
    labels_count = "places" if has_distances else "positions"
    if not takes_mean:
        first = None if groups.reach is None else groups.shift - groups.reach
        # compilers take numbers that are no literals for variables: torch 2.11 also defaults
        options: dict[str, Any] = {"mean_epsilon": 0.0, "labels_count": labels_count, "first_place": first}
        return KeyGroups(groups.queries, groups.keys, **options)
    # the authors' code adds it to the number of clusters that hold a token
    return KeyGroups(groups.queries, groups.keys, join="mean", mean_epsilon=1e-2, labels_count=labels_count)


@rows_or_all
def attend_groups(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    followed: LayerPattern,
    tokens: TokenMask,
    scale: float,
    dropout: float = 0.0,
    query_offset: QueryOffset = None,
    matrix: Tensor | None = None,
    bias: Tensor | None = None,
    need_weights: bool = False,
    backend: str = AUTO,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return `attend_layer` of chosen groups, which has neither weights nor mask matrices for them.

    These take memory for all pairs, as everywhere.
    """
    if matrix is None and bias is None and not need_weights:
        options |= {"backend": DENSE.get(backend, backend)}
        return attend_layer(query, key, value, followed, tokens, scale, dropout, query_offset, **options)
    if matrix is not None:
        check_matrix("attention_mask", matrix, (query.shape[0], query.shape[1], query.shape[2], key.shape[2]))
        tokens = replace(tokens, key_mask=readable_keys(matrix, query.shape[0]))
    tokens = tokens_of_layer(tokens, followed, key)
    call = build_call(query, key, value, followed, query_offset, tokens, scale=scale, dropout=dropout, **options)
    pairs = pairs_of(followed, query_offset, tokens, matrix, query, key)
    added = added_scores(matrix, bias, query, key)
    dtype = torch.promote_types(query.dtype, torch.float32)
    with autocast_off(query.device.type):
        scores = query.to(dtype) @ key.to(dtype).transpose(2, 3) * scale
        if added is not None:
            pairs = added > NEVER_READ if pairs is None else pairs & (added > NEVER_READ)
            scores = scores + added
        weights, _ = in_groups(scores, None, pairs, call)
    weights = weights.to(value.dtype)
    return (weights @ value).transpose(1, 2).contiguous(), weights if need_weights else None
