"""The clusters of routing heads: centroids by spherical k-means, as moving averages over training, and memberships.

A centroid is the mean, weighted by λ^age, of the queries and keys that it was nearest to: the moving average of their
sum divided by the moving average of their number. Both start at 0, so after a few steps the centroid is the mean of the
vectors seen so far (Adam's bias correction would cancel in the quotient). In the authors' code the sum starts as the
centroid and the number at 0, without a correction, so centroids start hundreds of times too long. A centroid that has
never been the nearest to any vector keeps its initial value, and one that gets no new vectors stays where it is.

The state belongs to the model: it is saved with it, stays in float32 and is the same in all processes, which add up
what their batches have shown. It changes only in training, after the last layer of a forward pass, and only in layers
whose projections are trained (with an adapter they are not). So the layers use the centroids from before this change,
also when gradient checkpointing recomputes them. A forward pass does not know the steps of the optimizer: methods that
compute a mini-batch twice in a step, with others in between (GradCache), must keep the centroids constant by
`centroid_decay=1.0`.

Source: Roy et al. (arXiv:2003.05997), section 4, and the authors' code.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed
from torch.nn.functional import layer_norm, pad
from transformers import initialization as init

from hf_efficient_attn.layout.top_k import highest, listed, tie_width
from hf_efficient_attn.layout.tracing import autocast_off
from hf_efficient_attn.models.parts.blocks import KeptInFloat32

NORM_EPS = 1e-6
# how many similarities are in memory at a time; on CPUs few enough to stay in the CPU's cache
MOST_NUMBERS, CACHED_NUMBERS = 1 << 24, 1 << 18


class Seen(NamedTuple):
    """What the centroids of a layer have seen in a batch.

    Attributes:
        sums, counts: the sum and the number of the vectors nearest to each centroid, [heads, clusters, head_dim] and
            [heads, clusters].
        distance: the squared difference between vectors and their centroids, mean over tokens, heads and head_dim;
            0-dim, differentiable. If a text is split over several processes, the share of this process.
    """

    sums: Tensor
    counts: Tensor
    distance: Tensor


class Centroids(KeptInFloat32):
    """The centroids of a layer's routing heads, and the moving averages that they are made of.

    Reads from the config: `num_clusters`, `head_dim`, `centroid_decay`.

    Attributes:
        num_copies: number of processes that see each batch; more than 1 under tensor parallelism.
    """

    num_copies = 1

    def __init__(self, config: Any, num_heads: int) -> None:
        super().__init__()
        self.config = config
        shape = (num_heads, config.num_clusters, config.head_dim)
        self.register_buffer("means", torch.zeros(shape, dtype=torch.float32))
        self.register_buffer("sums", torch.zeros(shape, dtype=torch.float32))
        self.register_buffer("counts", torch.zeros(shape[:2], dtype=torch.float32))

    def initialize(self) -> None:
        """Set the initial values: normally distributed vectors on the sphere."""
        start = torch.randn(self.means.shape, device=self.means.device, dtype=torch.float32)
        init.copy_(self.means, on_sphere(start))
        init.zeros_(self.sums)
        init.zeros_(self.counts)

    @torch.no_grad()
    def update(self, sums: Tensor, counts: Tensor) -> None:
        """Move the centroids towards what they have seen in a batch, see `Seen`; ignore sums that are not finite."""
        decay = self.config.centroid_decay
        # an optimizer step may be skipped if states are not finite, but an update of these buffers would stay
        is_finite = sums.isfinite().all(-1)
        sums, counts = sums.where(is_finite[..., None], 0.0), counts.where(is_finite, 0.0)
        self.sums.mul_(decay).add_(sums.to(self.sums), alpha=1 - decay)
        self.counts.mul_(decay).add_(counts.to(self.counts), alpha=1 - decay)
        is_known = (self.counts > 0)[..., None]
        self.means.copy_(torch.where(is_known, self.sums / self.counts.clamp(min=1e-30)[..., None], self.means))


def on_sphere(states: Tensor) -> Tensor:
    """Return vectors with mean 0 and norm √D, in their dtype: a norm without scale and bias. [..., D] → the same."""
    with autocast_off(states.device.type):
        wide = states.to(torch.promote_types(states.dtype, torch.float32))
        return layer_norm(wide, states.shape[-1:], eps=NORM_EPS).to(states.dtype)


@torch.no_grad()
def similarities(states: Tensor, means: Tensor) -> Tensor:
    """Return the products of vectors [B, heads, T, D] with the centroids [heads, clusters, D]: [B, heads, T, clusters].

    They are at least float32, because the nearest centroid must not depend on autocast.
    """
    with autocast_off(states.device.type):
        dtype = torch.promote_types(states.dtype, means.dtype)
        return states.to(dtype) @ means.to(dtype).transpose(1, 2)


def nearest(states: Tensor, means: Tensor) -> Tensor:
    """Return the centroid that is most similar to each vector, the first of equal ones: int [B, heads, T].

    Tokens are compared in parts; while compiling all at once, because lengths may be symbolic.
    """
    found = [similarities(part, means).argmax(-1) for part in in_parts(states, means.shape[1])]
    return found[0] if len(found) == 1 else torch.cat(found, 2)


def in_parts(states: Tensor, num_others: int) -> tuple[Tensor, ...]:
    """Return [B, heads, L, X] split along L into parts small enough for `num_others` numbers per place of L."""
    if torch.compiler.is_compiling():
        # a symbolic length cannot be split
        return (states,)
    most = CACHED_NUMBERS if states.device.type == "cpu" else MOST_NUMBERS
    return states.split(max(1, most // max(1, states.shape[0] * states.shape[1] * num_others)), 2)


def seen(states: Tensor, clusters: Tensor, is_real: Tensor, means: Tensor, num_real: Tensor) -> Seen:
    """Return what the centroids see in a batch.

    Args:
        states: vectors on the sphere, [B, heads, T, D].
        clusters: the nearest centroid of each vector, int [B, heads, T].
        is_real: which tokens are not padding, bool [B or 1, T].
        means: the centroids, [heads, clusters, D].
        num_real: number of tokens of the batch that are not padding, 0-dim.
    """
    num_heads, num_clusters, width = means.shape
    with autocast_off(states.device.type):
        wide = states.to(torch.promote_types(states.dtype, means.dtype))
        real = is_real[:, None].expand(clusters.shape)
        # centroids of all heads are numbered consecutively
        index = (clusters + num_clusters * torch.arange(num_heads, device=states.device)[:, None]).flatten()
        counted = real.flatten().to(wide.dtype)
        sums = wide.new_zeros(num_heads * num_clusters, width)
        sums.index_add_(0, index, torch.where(real[..., None], wide.detach(), 0.0).flatten(0, 2))
        counts = wide.new_zeros(num_heads * num_clusters).index_add_(0, index, counted)
        own = means.to(wide.dtype).flatten(0, 1).index_select(0, index).view_as(wide)
        squares = (wide - own).square().mean(-1)
        distance = torch.where(real, squares, 0.0).sum() / (num_real * num_heads).clamp(min=1)
        return Seen(sums.view_as(means), counts.view(num_heads, num_clusters), distance)


def seen_by_both(
    routed: tuple[Tensor, Tensor], clusters: tuple[Tensor, Tensor], is_token: Tensor, positions: Tensor, means: Tensor
) -> Seen:
    """Return what the centroids see in queries and keys; if both are the same, the loss counts them twice.

    This is what the authors' loss does.

    Args:
        routed: queries and keys of routing heads, one tensor if they are the same, [B, heads, T, D] each.
        clusters: the nearest centroid of each vector, int [B, heads, T].
        is_token: which tokens of the text are not padding, bool [B or 1, K].
        positions: the positions of the queries in the text, int [T].
        means: the centroids, [heads, clusters, D].
    """
    count = is_token.sum() * (len(routed[0]) // len(is_token))
    known = (is_token.index_select(1, positions), means, count)
    shown = seen(routed[0], clusters[0], *known)
    if routed[1] is routed[0]:
        return shown._replace(distance=2 * shown.distance)
    return joined(shown, seen(routed[1], clusters[1], *known))


def joined(of_queries: Seen, of_keys: Seen) -> Seen:
    """Return the sum of what the centroids see in the queries and in the keys of a layer."""
    return Seen(*(one + other for one, other in zip(of_queries, of_keys, strict=True)))


def update_all(modules: Sequence[Centroids], shown: Sequence[Seen]) -> None:
    """Update the centroids of several layers with what they have seen in the batches of all processes."""
    flat = torch.cat([each.detach().flatten() for layer in shown for each in (layer.sums, layer.counts)])
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        distributed.all_reduce(flat)
    sizes = [each.numel() for layer in shown for each in (layer.sums, layer.counts)]
    parts = flat.split(sizes)
    for index, module in enumerate(modules):
        sums, counts = (each / module.num_copies for each in parts[2 * index : 2 * index + 2])
        module.update(sums.view(module.sums.shape), counts.view(module.counts.shape))


# Which tokens are in which cluster, as the groups in which tokens of routing heads attend to each other.
#
# Balanced clusters choose their tokens, as in the authors' code: each cluster has the w tokens of a document that are
# most similar to its centroid. With causal membership a token chooses its cluster, the one with the most similar
# centroid, and attends to the last w tokens of that cluster, including itself; this depends on no later token. Padding
# is in no cluster, and clusters do not cross documents. If similarities of tokens differ only by rounding, as for equal
# tokens in the first layer, the tokens with the lower index are taken (`layout/top_k.py`). A token has one most similar
# centroid, because no two centroids are equal.
#
# A list of members is in the order of the text, with empty places (-1). The distance of two members counts places of
# the list; relative positions of routing heads use this distance, as in the authors' code.


EMPTY = -1
# with at least this many keys per query, every query gets its own list of keys: cheaper than lists of all members
FEW_QUERIES = 16
# the cache holds the index of a cluster as two digits to this base, which every dtype represents exactly
DIGIT = 256


class ClusterGroups(NamedTuple):
    """Groups of queries and keys, and which places of a group a query attends to.

    Attributes:
        queries, keys: positions, int [B, heads, groups, places].
        shift: a query at place i of `queries` is at place i + shift of `keys`.
        reach: a query attends to members at most this many places before itself; None: to all members.
    """

    queries: Tensor
    keys: Tensor
    shift: int
    reach: int | None = None


def places_of(cluster_tokens: int, num_keys: int) -> int:
    """Return how many places a cluster needs; while compiling, when lengths are symbolic, the maximum."""
    return cluster_tokens if torch.compiler.is_compiling() else min(cluster_tokens, num_keys)


def width_of_ties(dtype: torch.dtype, head_dim: int) -> float:
    """Return by how much products of equal vectors of norm √D with a centroid may differ; products are about √D."""
    return tie_width(dtype) * head_dim**0.5


def balanced_groups(
    of_queries: Tensor,
    of_keys: Tensor,
    documents: Tensor,
    num_queries: int,
    cluster_tokens: int,
    is_packed: bool,
    width: float = 0.0,
) -> ClusterGroups:
    """Return a group for each cluster: the tokens most similar to its centroid.

    Args:
        of_queries, of_keys: similarities of all tokens, [B, heads, K, clusters]; one tensor if they are the same.
        documents: the document of each token, int [B or 1, K]; -1: padding.
        num_queries: number of queries; they are the last tokens if no key comes after them.
        is_packed: whether rows hold several documents.
        width: similarities that differ by at most this count as equal; see `width_of_ties`.
    """
    members = packed_members if is_packed else row_members
    places = places_of(cluster_tokens, documents.shape[1])
    keys = members(of_keys.transpose(2, 3), documents, places, width)
    queries = keys if of_queries is of_keys else members(of_queries.transpose(2, 3), documents, places, width)
    if is_packed:
        # the members of a document are in one block of places or in two neighbouring ones
        blocks = with_neighbours(in_blocks(keys, places), 1, 1)
        return ClusterGroups(in_blocks(queries, places).flatten(2, 3), blocks.flatten(2, 3), places)
    # in cached decoding, few members are new; they are the last ones
    last = places if torch.compiler.is_compiling() else min(places, num_queries)
    is_whole = num_queries == documents.shape[1]
    return ClusterGroups(queries if is_whole else queries[..., -last:], keys, 0 if is_whole else places - last)


def row_members(similarity: Tensor, documents: Tensor, places: int, width: float) -> Tensor:
    """Return the members of each cluster if a row is one document: int [B, heads, clusters, places], empty first.

    similarity: [B, heads, clusters, K].
    """
    # some clusters at a time, because the ranks of all tokens take twice the memory of the similarities
    found = [_row_members(part, documents, places, width) for part in in_parts(similarity, similarity.shape[3])]
    return found[0] if len(found) == 1 else torch.cat(found, 2)


def _row_members(similarity: Tensor, documents: Tensor, places: int, width: float) -> Tensor:
    is_real = (documents != EMPTY)[:, None, None]
    if torch.compiler.is_compiling():
        # there may be more places than tokens
        similarity, is_real = pad(similarity, (0, places)), pad(is_real, (0, places))
    return listed(highest(similarity.masked_fill(~is_real, -torch.inf), places, width) & is_real, places)


def packed_members(similarity: Tensor, documents: Tensor, places: int, width: float) -> Tensor:
    """Return the members of each cluster in every document of a row: int [B, heads, clusters, whole blocks of places].

    A document has at most `places` members of a cluster; the members of its documents follow one another.
    """
    num_keys, shape = documents.shape[1], similarity.shape
    # tokens in the order of their documents, and for each the places of its document's first and last ranked member
    in_order, order = documents.sort(dim=-1, stable=True)
    index = torch.arange(num_keys, device=documents.device)
    is_start = pad(in_order[:, 1:] != in_order[:, :-1], (1, 0), value=True)
    start = torch.where(is_start, index, 0).cummax(-1).values
    last = (start + places - 1).clamp(max=num_keys - 1)
    has_last = (start + places <= num_keys) & (in_order.gather(1, last) == in_order)
    is_token, has_last = ((each[:, None, None]) for each in (in_order != EMPTY, has_last))
    order, start, last, of_tokens = (each[:, None, None].expand(shape) for each in (order, start, last, documents))
    # like `highest`, but within each document
    values, ranked = similarity.sort(dim=-1, descending=True)
    values = values.gather(3, of_tokens.gather(3, ranked).sort(dim=-1, stable=True).indices)
    least = values.gather(3, last).masked_fill(~has_last, -torch.inf)
    similarity = similarity.gather(3, order)
    is_above = similarity > least + width
    is_level = (similarity >= least - width) & ~is_above
    num_above = torch.zeros_like(start).scatter_add(3, start, is_above.long()).gather(3, start)
    level = is_level.cumsum(-1)
    rank = level - (level - is_level.long()).gather(3, start)
    is_member = (is_above | (is_level & (rank <= places - num_above))) & is_token
    found = listed(torch.zeros_like(is_member).scatter(3, order, is_member), num_keys)
    return pad(found, (-num_keys % places, 0), value=EMPTY)


def causal_groups(
    clusters: Tensor, documents: Tensor, positions: Tensor, num_clusters: int, cluster_tokens: int
) -> ClusterGroups:
    """Return groups in which each query attends to the last members of its own cluster.

    Args:
        clusters: the cluster of each key, int [B, heads, K].
        documents: the document of each key, int [B or 1, K]; -1: padding.
        positions: the positions of the queries, int [T].
    """
    num_queries, num_keys = positions.shape[0], documents.shape[1]
    clusters = torch.where((documents != EMPTY)[:, None], clusters, num_clusters)
    places = places_of(cluster_tokens, num_keys)
    if num_queries == 1 or num_queries * FEW_QUERIES <= num_keys:
        return query_groups(clusters, documents, positions, places)
    return block_groups(clusters, num_clusters, places)


def query_groups(clusters: Tensor, documents: Tensor, positions: Tensor, places: int) -> ClusterGroups:
    """Return a group for each query: the keys that it attends to."""
    index = torch.arange(documents.shape[1], device=documents.device)
    shape = (clusters.shape[0], clusters.shape[1], -1)
    own_cluster = clusters.index_select(2, positions)
    own_document = documents.index_select(1, positions)
    is_member = (clusters[:, :, None] == own_cluster[..., None]) & (index <= positions[:, None])
    is_member = (
        is_member & ((documents[:, None] == own_document[..., None]) & (own_document[..., None] != EMPTY))[:, None]
    )
    found = torch.where(is_member, index, EMPTY)
    if torch.compiler.is_compiling():
        found = pad(found, (places, 0), value=EMPTY)
    keys = found.topk(places, -1).values.flip(-1)
    return ClusterGroups(positions.expand(shape)[..., None], keys, places - 1)


def block_groups(clusters: Tensor, num_clusters: int, places: int) -> ClusterGroups:
    """Return groups by blocks of a cluster, whose queries attend to their block and to at most two before it.

    A block has ⌈places / 2⌉ places.

    clusters: int [B, heads, K]; padding is in the cluster `num_clusters`.
    """
    batch_size, num_heads, num_keys = clusters.shape
    block = (places + 1) // 2
    before = -(-(places - 1) // block)
    in_order, order = clusters.sort(dim=-1, stable=True)
    sizes = torch.zeros(batch_size, num_heads, num_clusters + 1, dtype=torch.long, device=clusters.device)
    sizes = sizes.scatter_add(2, clusters, torch.ones_like(clusters))
    # each cluster fills whole blocks
    room = (sizes + block - 1) // block * block
    rank = torch.arange(num_keys, device=clusters.device) - (sizes.cumsum(2) - sizes).gather(2, in_order)
    # may be one too many; torch.export does not simplify this quotient, and sees that lists consist of whole blocks
    num_blocks = (num_keys + num_clusters * block + block - 1) // block
    place = ((room.cumsum(2) - room).gather(2, in_order) + rank).clamp(max=num_blocks * block)
    place = torch.where(in_order == num_clusters, num_blocks * block, place)
    empty = torch.full((batch_size, num_heads, num_blocks * block + 1), EMPTY, device=clusters.device)
    shape = (batch_size, num_heads, num_blocks, block)
    members, cluster_of = (empty.scatter(2, place, each)[..., :-1].reshape(shape) for each in (order, in_order))
    keys, their_cluster = (with_neighbours(each, before, 0) for each in (members, cluster_of))
    keys = torch.where(their_cluster == cluster_of[..., :1], keys, EMPTY)
    return ClusterGroups(members, keys, before * block, places - 1)


def in_blocks(places: Tensor, size: int) -> Tensor:
    """Return lists [..., n] split into blocks of equal size, [..., blocks, size]."""
    return places.reshape(*places.shape[:-1], places.shape[-1] // size, size)


def with_neighbours(blocks: Tensor, before: int, after: int) -> Tensor:
    """Return each block of [..., blocks, size] joined with its neighbours, which are empty beyond the ends.

    before, after: number of neighbours on each side.
    """
    num_blocks = blocks.shape[-2]
    filled = pad(blocks, (0, 0, before, after), value=EMPTY)
    return torch.cat([filled[..., each : each + num_blocks, :] for each in range(before + after + 1)], -1)


def clusters_of(members: Tensor, num_clusters: int, num_keys: int) -> Tensor:
    """Return the clusters that hold each token, ascending, padded with -1: int [B, heads, K, most of a token].

    members: the members of balanced clusters, [B, heads, groups, places]; the groups of a cluster are neighbours.

    >>> clusters_of(torch.tensor([[[[-1, 2], [0, 2]]]]), 2, 3).tolist()
    [[[[1, -1], [-1, -1], [0, 1]]]]
    """
    places = members.unflatten(2, (num_clusters, -1)).flatten(3)
    places = torch.where(places == EMPTY, num_keys, places)
    holds = places.new_zeros(*places.shape[:3], num_keys + 1, dtype=torch.bool).scatter_(3, places, True)
    number = torch.arange(num_clusters, device=members.device)
    found = torch.where(holds[..., :-1].transpose(2, 3), number, num_clusters).sort(-1).values
    most = max(1, int((found < num_clusters).sum(-1).max()))
    return torch.where(found < num_clusters, found, EMPTY)[..., :most]


def digits(numbers: Tensor) -> Tensor:
    """Return integers as two digits, [..., 2], which every floating-point dtype represents exactly.

    >>> digits(torch.tensor(515)).tolist()
    [2, 3]
    """
    return torch.stack((numbers // DIGIT, numbers % DIGIT), -1)


def number_of(two: Tensor) -> Tensor:
    """Return the integers of two digits, the inverse of `digits`.

    >>> int(number_of(digits(torch.tensor(515)).bfloat16()))
    515
    """
    return two[..., 0].long() * DIGIT + two[..., 1].long()
