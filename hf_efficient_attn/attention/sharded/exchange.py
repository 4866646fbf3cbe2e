"""Rows of a tensor that processes send each other, with gradients that travel back."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed

from hf_efficient_attn.patterns.intervals import Intervals, intersect, size


@dataclass(frozen=True)
class Route:
    """Which rows a process sends to each of the others, and how many it receives from each.

    Attributes:
        sent: intervals of rows for every process, in the order of ranks; empty for the process itself.
        num_received: rows from every process.
    """

    sent: tuple[Intervals, ...]
    num_received: tuple[int, ...]

    @property
    def num_sent(self) -> tuple[int, ...]:
        """Rows for every process."""
        return tuple(map(size, self.sent))


def route_of(rank: int, bounds: Sequence[tuple[int, int]], wanted: Sequence[Intervals]) -> Route:
    """Return the route by which every process gets the positions that it wants from the processes that hold them.

    bounds: the positions that each process holds.
    wanted: intervals of positions for each process.

    >>> route_of(1, [(0, 4), (4, 8)], [((4, 6),), ((3, 4),)])
    Route(sent=(((0, 2),), ()), num_received=(1, 0))
    """
    first, stop = bounds[rank]
    sent = []
    for other, positions in enumerate(wanted):
        own = () if other == rank else intersect(positions, ((first, stop),))
        sent.append(tuple((start - first, end - first) for start, end in own))
    received = [
        0 if other == rank else size(intersect(wanted[rank], ((start, end),)))
        for other, (start, end) in enumerate(bounds)
    ]
    return Route(tuple(sent), tuple(received))


class Exchange(torch.autograd.Function):
    """Send rows of a tensor, and receive those of others; gradients go back to where their rows came from."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, route: Route, group: Any) -> Tensor:
        pieces = [rows[start:stop] for intervals in route.sent for start, stop in intervals]
        ctx.route, ctx.group, ctx.shape = route, group, rows.shape
        sent = torch.cat(pieces) if pieces else rows.new_empty(0, *rows.shape[1:])
        return send(sent, route.num_sent, route.num_received, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        route: Route = ctx.route
        returned = send(gradient.contiguous(), route.num_received, route.num_sent, ctx.group)
        total = gradient.new_zeros(ctx.shape)
        pieces = [(start, stop) for intervals in route.sent for start, stop in intervals]
        for (start, stop), piece in zip(pieces, returned.split([b - a for a, b in pieces]), strict=True):
            total[start:stop] += piece
        return total, None, None


def send(rows: Tensor, num_sent: Sequence[int], num_received: Sequence[int], group: Any) -> Tensor:
    """Return the rows from every process, after sending it the next `num_sent` rows."""
    received = rows.new_empty(sum(num_received), *rows.shape[1:])
    # of one dimension each, since not every backend counts rows
    width = rows[:1].numel() if len(rows) else received[:1].numel()
    to_receive, to_send = ([count * width for count in each] for each in (num_received, num_sent))
    distributed.all_to_all_single(received.view(-1), rows.reshape(-1), to_receive, to_send, group)
    return received


class Tie(torch.autograd.Function):
    """Return a tensor as it is, and give others a gradient of zero, so that every process returns what it received."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, *others: Tensor) -> Tensor:
        ctx.save_for_backward(*others)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return gradient, *map(torch.zeros_like, ctx.saved_tensors)
