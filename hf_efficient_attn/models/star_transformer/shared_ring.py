"""Rings of texts that processes share: each gets the neighbours of its tokens, and sums are over those of all."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.attention.sharded.exchange import Route, exchanged, route_of
from hf_efficient_attn.attention.sharded.key_exchange import true_intervals
from hf_efficient_attn.attention.sharded.sequence_shards import SequenceShards, shard_bounds
from hf_efficient_attn.layout.host_copies import on_host

from .ring import Ring


@dataclass(frozen=True)
class SharedTokens:
    """How a process gets the neighbours of its tokens that others hold.

    Attributes:
        route: of them; those that are received are in the order of their positions.
        group: the processes.
    """

    route: Route
    group: Any

    def held(self, states: Tensor) -> Tensor:
        """Return the states of tokens that were received, and behind them those of this process, [B, n, X] → K."""
        rows = states.transpose(0, 1)
        sent = torch.cat([rows[:0], *(rows[start:stop] for start, stop in self.route.slices)])
        received = exchanged(sent, self.route.num_sent, self.route.num_received, self.group)
        return torch.cat((received, rows)).transpose(0, 1)


def own_ring(ring: Ring, shards: SequenceShards, num_tokens: int, batch_size: int) -> Ring:
    """Return the ring of this process's tokens, given that of whole texts, whose neighbours are places among `held`."""
    device = ring.has_left.device if ring.has_left is not None else ring.real.device
    index = torch.arange(num_tokens, device=device).expand(batch_size, -1)
    left, right = ((index - 1) % num_tokens, (index + 1) % num_tokens) if ring.left is None else (ring.left, ring.right)
    bounds = shard_bounds(num_tokens, shards.size)
    beside = on_host(torch.stack((left, right)))
    wanted = []
    for first, stop in bounds:
        is_wanted = torch.zeros(num_tokens, dtype=torch.bool)
        is_wanted[beside[:, :, first:stop].flatten()] = True
        is_wanted[first:stop] = False
        wanted.append(true_intervals(is_wanted))
    own = shards.own(num_tokens)
    held = [position for each in (*wanted[shards.rank], bounds[shards.rank]) for position in range(*each)]
    places = torch.zeros(num_tokens, dtype=torch.int64)
    places[torch.tensor(held)] = torch.arange(len(held))
    places = places.to(device)

    def of_own(each: Tensor | None) -> Tensor | None:
        return None if each is None else each[:, own]

    return replace(
        ring,
        real=of_own(ring.real),
        documents=torch.zeros_like(index[:, own]) if ring.documents is None else ring.documents[:, own],
        has_left=of_own(ring.has_left),
        has_right=of_own(ring.has_right),
        left=places[left[:, own]],
        right=places[right[:, own]],
        shared=SharedTokens(route_of(shards.rank, bounds, wanted), shards.group),
    )
