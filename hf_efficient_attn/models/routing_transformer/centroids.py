"""The centroids of routing heads: spherical k-means whose means are moving averages over training.

A centroid is the mean of the queries and keys that it was nearest to, weighted by λ^age: the moving average of their
sum divided by that of their number. Both start at 0, so that the mean of few steps is a mean of what they saw (Adam's
correction of the start, which cancels here). In the authors' code the sum starts as the centroid and the number at 0,
without a correction, so that centroids begin hundreds of times too long. A centroid that nothing has been near keeps
its start value, and one to which nothing comes any more stays where it is.

The state belongs to the model: it is saved with it, stays in float32 and is the same in all processes, which add up
what their batches have seen. It changes in training alone, after the last layer of a forward pass whose projections
are being trained (with an adapter they are not): what the layers read, and read again under gradient checkpointing, are
the centroids of before. A forward pass knows of no steps: what computes several batches in one, and one of them again
(GradCache), must keep them by `centroid_decay=1.0`.

Source: Roy et al. (arXiv:2003.05997), section 4, and the authors' code.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed
from torch.nn.functional import layer_norm
from transformers import initialization as init

from hf_efficient_attn.layout.tracing import autocast_off
from hf_efficient_attn.models.parts.blocks import KeptInFloat32

NORM_EPS = 1e-6
# similarities that are in memory at a time; on CPUs, so few that they stay in a cache
MOST_NUMBERS, CACHED_NUMBERS = 1 << 24, 1 << 18


class Seen(NamedTuple):
    """What the centroids of a layer have seen in a batch.

    Attributes:
        sums, counts: of the vectors nearest to each centroid, [heads, clusters, head_dim] and [heads, clusters].
        distance: the mean squared distance of a number to that of its centroid, 0-dim, differentiable; of a text over
            several processes, this one's share of it.
    """

    sums: Tensor
    counts: Tensor
    distance: Tensor


class Centroids(KeptInFloat32):
    """The centroids of a layer's routing heads, and the moving averages that they are made of.

    Reads from the config: `num_clusters`, `head_dim`, `centroid_decay`.

    Attributes:
        num_copies: how many processes see each batch, as under tensor parallelism.
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
        """Set the start values: normal vectors on the sphere."""
        start = torch.randn(self.means.shape, device=self.means.device, dtype=torch.float32)
        init.copy_(self.means, on_sphere(start))
        init.zeros_(self.sums)
        init.zeros_(self.counts)

    @torch.no_grad()
    def update(self, sums: Tensor, counts: Tensor) -> None:
        """Move the centroids towards what a batch has shown; see `Seen`. States that are not finite show nothing."""
        decay = self.config.centroid_decay
        # an optimizer step may be skipped for such states, but what is kept here would stay
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

    At least in float32, whatever the dtype of the model: which centroid is nearest must not depend on autocast.
    """
    with autocast_off(states.device.type):
        dtype = torch.promote_types(states.dtype, means.dtype)
        return states.to(dtype) @ means.to(dtype).transpose(1, 2)


def nearest(states: Tensor, means: Tensor) -> Tensor:
    """Return the centroid that is most similar to each vector, of equals the first: int [B, heads, T].

    Some tokens are compared at a time; while compiling all are, since lengths may be symbols.
    """
    found = [similarities(part, means).argmax(-1) for part in in_parts(states, means.shape[1])]
    return found[0] if len(found) == 1 else torch.cat(found, 2)


def in_parts(states: Tensor, num_others: int) -> tuple[Tensor, ...]:
    """Return [B, heads, L, X] cut along L into what is compared with `num_others` others at a time."""
    if torch.compiler.is_compiling():
        # a length that is a symbol cannot be cut
        return (states,)
    most = CACHED_NUMBERS if states.device.type == "cpu" else MOST_NUMBERS
    return states.split(max(1, most // max(1, states.shape[0] * states.shape[1] * num_others)), 2)


def seen(states: Tensor, clusters: Tensor, is_real: Tensor, means: Tensor, num_real: Tensor) -> Seen:
    """Return what a batch shows the centroids.

    Args:
        states: on the sphere, [B, heads, T, D].
        clusters: the nearest centroid of each, int [B, heads, T].
        is_real: which tokens are not padding, bool [B or 1, T].
        means: [heads, clusters, D].
        num_real: how many tokens of the batch are no padding, 0-dim.
    """
    num_heads, num_clusters, width = means.shape
    with autocast_off(states.device.type):
        wide = states.to(torch.promote_types(states.dtype, means.dtype))
        real = is_real[:, None].expand(clusters.shape)
        # the centroids of all heads in a row
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
    """Return what queries and keys show the centroids; the authors' loss counts those that are the same twice.

    Args:
        routed: queries and keys of routing heads, one tensor if they are the same, [B, heads, T, D] each.
        clusters: the nearest centroid of each, int [B, heads, T].
        is_token: which tokens of the text are not padding, bool [B or 1, K].
        positions: where the queries stand in it, int [T].
        means: [heads, clusters, D].
    """
    count = is_token.sum() * (len(routed[0]) // len(is_token))
    known = (is_token.index_select(1, positions), means, count)
    shown = seen(routed[0], clusters[0], *known)
    if routed[1] is routed[0]:
        return shown._replace(distance=2 * shown.distance)
    return joined(shown, seen(routed[1], clusters[1], *known))


def joined(of_queries: Seen, of_keys: Seen) -> Seen:
    """Return what queries and keys of a layer show together."""
    return Seen(*(one + other for one, other in zip(of_queries, of_keys, strict=True)))


def update_all(modules: Sequence[Centroids], shown: Sequence[Seen]) -> None:
    """Update the centroids of several layers by what the batches of all processes have shown."""
    flat = torch.cat([each.detach().flatten() for layer in shown for each in (layer.sums, layer.counts)])
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        distributed.all_reduce(flat)
    sizes = [each.numel() for layer in shown for each in (layer.sums, layer.counts)]
    parts = flat.split(sizes)
    for index, module in enumerate(modules):
        sums, counts = (each / module.num_copies for each in parts[2 * index : 2 * index + 2])
        module.update(sums.view(module.sums.shape), counts.view(module.counts.shape))
