"""Multi-head attention of the Routing Transformer: routing heads first, then local heads."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import initialization as init
from transformers.cache_utils import Cache

from hf_efficient_attn.attention.build_call import LayerPattern, QueryOffset, build_call
from hf_efficient_attn.attention.explanation import LayerRequest
from hf_efficient_attn.attention.layer import (
    NEVER_READ,
    added_scores,
    attend_layer,
    check_matrix,
    pairs_of,
    readable_keys,
    rows_or_all,
    tokens_of_layer,
)
from hf_efficient_attn.attention.select import AUTO
from hf_efficient_attn.integration.layer_patterns import layer_pattern
from hf_efficient_attn.layout.grouped_keys import KeyGroups
from hf_efficient_attn.layout.grouped_reference import in_groups
from hf_efficient_attn.layout.score_terms import Distance, Label, Term
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.layout.tracing import autocast_off
from hf_efficient_attn.models.base import backend_of
from hf_efficient_attn.models.inputs import LayerInputs
from hf_efficient_attn.models.parts.attention import MultiHeadAttention
from hf_efficient_attn.models.parts.blocks import append_to_cache, check_cached
from hf_efficient_attn.models.parts.embeddings import rotate_both
from hf_efficient_attn.models.parts.memberships import Membership, record_membership
from hf_efficient_attn.patterns.bands import Band, Causal, Full
from hf_efficient_attn.patterns.pattern import Pattern

from .clusters import (
    EMPTY,
    Centroids,
    ClusterGroups,
    Seen,
    balanced_groups,
    causal_groups,
    clusters_of,
    digits,
    nearest,
    number_of,
    on_sphere,
    seen_by_both,
    similarities,
    width_of_ties,
)

# each group has its own softmax, which no mask of torch's SDPA can express, so dense attention is the reference
DENSE = {"sdpa": "reference"}


class DistanceVectors(nn.Module):
    """A trained vector per distance, added to the keys of all heads; distances beyond the last share its vector.

    Distances are query - key; in causal heads they start at 0. Source: Shaw et al. (arXiv:1803.02155); the authors of
    the Routing Transformer also add vectors to the values, which we leave out.

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
        """Return what is added to the scores of queries [B, H, T, D] at each distance, [B, H, T, distances].

        This is a tensor and not a `Term`, so that DeepSpeed sees that the backward pass needs the module's weight.
        """
        return (query * scale) @ self.weight.to(query.dtype).T

    def term(self, query: Tensor, scale: float, shift: int = 0) -> Term:
        """Return the term of queries; `shift`: a label is the distance minus this."""
        return Term(self(query, scale), Distance(self.first - shift, self.last - shift))


def key_groups(groups: ClusterGroups, takes_mean: bool, has_distances: bool) -> KeyGroups:
    """Return the groups for the engine.

    Args:
        takes_mean: whether a token may be in several clusters.
        has_distances: whether there is a term; its labels count places.
    """
    labels_count = "places" if has_distances else "positions"
    if not takes_mean:
        first = None if groups.reach is None else groups.shift - groups.reach
        # compilers treat numbers that are not literals as variables, torch 2.11 also the default of `mean_epsilon`
        options: dict[str, Any] = {"mean_epsilon": 0.0, "labels_count": labels_count, "first_place": first}
        return KeyGroups(groups.queries, groups.keys, **options)
    # the authors' code adds this epsilon to the number of clusters that hold a token
    return KeyGroups(groups.queries, groups.keys, join="mean", mean_epsilon=1e-2, labels_count=labels_count)


@rows_or_all
def attend_groups(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layer_spec: LayerPattern,
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
    """Return `attend_layer` of chosen groups, extended by weights and mask matrices.

    Weights and mask matrices take memory for all pairs, as everywhere.
    """
    if matrix is None and bias is None and not need_weights:
        options |= {"backend": DENSE.get(backend, backend)}
        return attend_layer(query, key, value, layer_spec, tokens, scale, dropout, query_offset, **options)
    if matrix is not None:
        check_matrix("attention_mask", matrix, (query.shape[0], query.shape[1], query.shape[2], key.shape[2]))
        tokens = replace(tokens, key_mask=readable_keys(matrix, query.shape[0]))
    tokens = tokens_of_layer(tokens, layer_spec, key)
    call = build_call(query, key, value, layer_spec, query_offset, tokens, scale=scale, dropout=dropout, **options)
    pairs = pairs_of(layer_spec, query_offset, tokens, matrix, query, key)
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


@dataclass(frozen=True)
class RoutingInputs(LayerInputs):
    """Inputs of layers with routing heads.

    Attributes:
        documents: the document of each key, int [B or 1, K], -1 for padding.
        query_positions: the positions of the queries among the keys, int [T].
    """

    documents: Tensor | None = None
    query_positions: Tensor | None = None


class RoutingAttention(MultiHeadAttention):
    """Heads that attend within clusters, and heads that follow a pattern. [B, T, hidden_size] → the same."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.num_routing = config.routing_heads(layer_idx)
        self.num_local = self.num_heads - self.num_routing
        self.num_key_heads = self.num_local if config.shares_qk else self.num_heads
        width, bias = config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(width, width, bias=bias)
        self.k_proj = nn.Linear(width, self.num_key_heads * self.head_dim, bias=bias) if self.num_key_heads else None
        self.v_proj = nn.Linear(width, width, bias=bias)
        self.o_proj = nn.Linear(width, width, bias=config.attention_output_bias)
        self.head_map = nn.Linear(self.head_dim, self.head_dim, bias=False) if config.head_map else nn.Identity()
        self.centroids = Centroids(config, self.num_routing) if self.num_routing else None
        is_relative = config.position_embedding_type == "relative_keys"
        self.local_distances = DistanceVectors(config) if is_relative and self.num_local else None
        self.member_distances = DistanceVectors(config) if is_relative and self.num_routing else None

    def forward(
        self,
        hidden_states: Tensor,
        inputs: RoutingInputs,
        means: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None, Seen | tuple[()]]:
        """Return the output, the weights [B, H, T, K] with `output_attentions`, and in training what centroids see.

        means: the centroids, [routing heads, clusters, D]; None: the module's own.
        """
        query, value = (self.heads(each(hidden_states)) for each in (self.q_proj, self.v_proj))
        key = query[:, :0] if self.k_proj is None else self.heads(self.k_proj(hidden_states))
        places = inputs.documents, inputs.query_positions
        centroid_scores, shown = None, ()
        if self.centroids is not None:
            means = self.centroids.means if means is None else means
            query, key = self._normed(query, key)
            centroid_scores, shown = self._compared(self._routed(query, key), means, *places)
        if position_embeddings is not None:
            query, key = rotate_both(query, key, *position_embeddings)
        if cache is not None:
            key, value, centroid_scores = self._append(cache, key, value, centroid_scores)
        options, parts = self.engine_options(inputs, kwargs), []
        if centroid_scores is not None:
            parts.append(self._route(query, key, value, centroid_scores, places, options))
        if self.num_local:
            parts.append(self._read_locally(query, key, value, options))
        outs, weights = zip(*parts, strict=True)
        out = self.o_proj(self.head_map(torch.cat(outs, 2)).flatten(2))
        return out, None if weights[0] is None else torch.cat(weights, 1), shown

    def layer_request(self, num_keys: int, task: str | None) -> LayerRequest:
        """Return what routing heads and local heads ask the engine for."""
        if not self.num_routing:
            return self._request_locally()
        request = self._request_by_routing(num_keys)
        return replace(request, beside=self._request_locally()) if self.num_local else request

    def _request_locally(self) -> LayerRequest:
        labels: tuple[Label, ...] = ()
        if self.local_distances is not None:
            labels = (Distance(self.local_distances.first, self.local_distances.last),)
        return self.request(self._local_layer_spec(), self.num_local, labels=labels)

    def _request_by_routing(self, num_keys: int) -> LayerRequest:
        config, is_balanced = self.config, self.config.has_balanced_clusters
        documents = torch.zeros(1, num_keys, dtype=torch.long, device="meta")
        shape = (1, self.num_routing, num_keys, config.num_clusters if is_balanced else 2)
        centroid_scores = documents.new_empty(shape, dtype=torch.float32)
        queries = centroid_scores if config.shares_qk else torch.empty_like(centroid_scores)
        groups = self._groups((queries, centroid_scores), documents, documents[0], False, centroid_scores.dtype)
        labels: tuple[Label, ...] = ()
        if self.member_distances is not None:
            labels = (Distance(self.member_distances.first - groups.shift, self.member_distances.last - groups.shift),)
        kind = f"tokens of each of {config.num_clusters} balanced clusters"
        says = (
            f"{config.cluster_tokens} {kind}"
            if is_balanced
            else f"the last {config.cluster_tokens} members of its cluster"
        )
        most = config.cluster_tokens * (config.num_clusters if is_balanced else 1)
        backend = backend_of(config)
        return self.request(
            self._routing_layer_spec(),
            self.num_routing,
            labels=labels,
            backend=DENSE.get(backend, backend),
            notes=(f"{self.num_routing} of {self.num_heads} heads route: a query attends to at most {says}.",),
            chosen=key_groups(groups, is_balanced, self.member_distances is not None),
            # a token is a member of its own cluster, whether or not it attends to itself
            most_keys=most if config.include_self or is_balanced or not self.is_causal else most - 1,
        )

    def _normed(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries and keys of all heads, [B, H, T, D], normalized to the sphere in routing heads."""
        queries, keys = query.split((self.num_routing, self.num_local), 1), key[:, -self.num_local :]
        routed = on_sphere(queries[0])
        if self.config.shares_qk:
            routed_keys, keys = routed, key
        else:
            routed_keys, keys = on_sphere(key[:, : self.num_routing]), key[:, self.num_routing :]
        return torch.cat((routed, queries[1]), 1), torch.cat((routed_keys, keys), 1)

    def _routed(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return the queries and keys of routing heads, one tensor if they are the same."""
        queries = query[:, : self.num_routing]
        return queries, queries if self.config.shares_qk else key[:, : self.num_routing]

    def _of_both(self, function: Callable[[Tensor], Tensor], queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return a function of queries and of keys, one tensor if they are the same."""
        of_queries = function(queries)
        return of_queries, of_queries if self.config.shares_qk else function(keys)

    def _compared(
        self, routed: tuple[Tensor, Tensor], means: Tensor, documents: Tensor, positions: Tensor
    ) -> tuple[tuple[Tensor, Tensor], Seen | tuple[()]]:
        """Return what determines the clusters of queries and keys (`_groups`), and in training what centroids see."""
        is_balanced, shown = self.config.has_balanced_clusters, ()
        if self.training or not is_balanced:
            clusters = self._of_both(lambda states: nearest(states, means), *routed)
        if self.training:
            shown = seen_by_both(routed, clusters, documents != EMPTY, positions, means)
        if is_balanced:
            return self._of_both(lambda states: similarities(states, means), *routed), shown
        return (digits(clusters[1]),) * 2, shown

    def _append(
        self, cache: Cache, key: Tensor, value: Tensor, centroid_scores: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
        """Return keys and values of all tokens, and what determines their clusters, which is cached with the keys."""
        if centroid_scores is None:
            return *append_to_cache(cache, key, value, self.layer_idx), None
        numbers = pad(centroid_scores[1].to(key.dtype), (0, 0, 0, 0, 0, self.num_local))
        key = torch.cat((key, numbers), -1)
        why = f"keys of {key.shape[3]} numbers, including those that assign a token to clusters"
        check_cached(cache, self.layer_idx, why, (None, key.shape[3]))
        keys, value = append_to_cache(cache, key, value, self.layer_idx)
        key, numbers = keys[..., : self.head_dim], keys[:, : self.num_routing, :, self.head_dim :]
        return key, value, (numbers, numbers)

    def _groups(
        self,
        centroid_scores: tuple[Tensor, Tensor],
        documents: Tensor,
        positions: Tensor,
        is_packed: bool,
        dtype: torch.dtype,
    ) -> ClusterGroups:
        """Return the groups of all tokens, from the similarities or, with causal membership, the digits of clusters.

        dtype: the dtype of the vectors that are compared with centroids.
        """
        num_tokens, num_clusters = self.config.cluster_tokens, self.config.num_clusters
        if self.config.has_balanced_clusters:
            width = width_of_ties(dtype, self.head_dim)
            return balanced_groups(*centroid_scores, documents, positions.shape[0], num_tokens, is_packed, width)
        return causal_groups(number_of(centroid_scores[1]), documents, positions, num_clusters, num_tokens)

    def _membership(
        self, centroid_scores: tuple[Tensor, Tensor], groups: ClusterGroups, documents: Tensor
    ) -> Membership:
        """Return the clusters of each token: all that hold it, or with causal membership its own."""
        num_clusters, num_keys = self.config.num_clusters, documents.shape[1]
        if self.config.has_balanced_clusters:
            queries = clusters_of(groups.queries, num_clusters, num_keys)
            keys = queries if self.config.shares_qk else clusters_of(groups.keys, num_clusters, num_keys)
            return Membership("cluster", num_clusters, queries, keys)
        own = torch.where((documents != EMPTY)[:, None], number_of(centroid_scores[1]), EMPTY)[..., None]
        return Membership("cluster", num_clusters, own, own)

    def _route(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        centroid_scores: tuple[Tensor, Tensor],
        places: tuple[Tensor, Tensor],
        options: dict[str, Any],
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output of routing heads, and the weights if they are needed.

        places: the documents of all keys, and the positions of the queries.
        """
        query, key, value = (each[:, : self.num_routing] for each in (query, key, value))
        documents, positions = places
        is_packed = options["tokens"].segment_ids is not None
        groups = self._groups(centroid_scores, documents, positions, is_packed, query.dtype)
        record_membership(self.layer_idx, lambda: self._membership(centroid_scores, groups, documents))
        scale = float(self.config.routing_scale)
        distances = self.member_distances
        terms = () if distances is None else (distances.term(query, scale, groups.shift),)
        chosen = key_groups(groups, self.config.has_balanced_clusters, distances is not None)
        layer_spec = self._routing_layer_spec()
        return attend_groups(query, key, value, layer_spec, scale=scale, terms=terms, chosen=chosen, **options)

    def _read_locally(
        self, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        query, key, value = (each[:, self.num_routing :] for each in (query, key, value))
        terms = () if self.local_distances is None else (self.local_distances.term(query, self.scaling),)
        return attend_layer(query, key, value, self._local_layer_spec(), scale=self.scaling, terms=terms, **options)

    def _routing_layer_spec(self) -> LayerPattern:
        """Return the pattern of all pairs that routing heads may choose from."""
        pattern: Pattern = Full()
        if self.is_causal:
            pattern = Causal() if self.config.include_self else Band(None, -1)
        return LayerPattern(pattern, self.layer_idx, is_own=False)

    def _local_layer_spec(self) -> LayerPattern:
        layer_spec = layer_pattern(self, {"is_causal": self.is_causal})
        heads = {"first_head": self.num_routing, "num_model_heads": self.num_heads}
        return replace(layer_spec, **heads)
