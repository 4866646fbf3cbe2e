"""Asynchronous exchange of tensor rows between processes; gradients travel back in the same way."""

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
        num_received: the number of rows from every process.
    """

    sent: tuple[Intervals, ...]
    num_received: tuple[int, ...]

    @property
    def num_sent(self) -> tuple[int, ...]:
        """The number of rows for every process."""
        return tuple(map(size, self.sent))

    @property
    def slices(self) -> list[tuple[int, int]]:
        """The intervals of rows for all processes, one after the other."""
        return [interval for intervals in self.sent for interval in intervals]


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


@dataclass(frozen=True)
class Travelling:
    """Rows in transit: the tensor that is being filled, the sent tensor, which must stay alive, and the work handle."""

    received: Tensor
    sent: Tensor
    work: Any


class Exchange:
    """One exchange of rows, which travel during the computation between `depart` and `arrive`.

    In the backward pass, the gradients travel while this computation is differentiated. The output of every process has
    to depend on what arrives (see `Tie`); otherwise the others would wait for its gradients.

    Args:
        num_sent, num_received: the number of rows for each process of the group, and from each.
    """

    def __init__(self, num_sent: Sequence[int], num_received: Sequence[int], group: Any) -> None:
        self.num_sent, self.num_received, self.group = num_sent, num_received, group
        self.travelling: Travelling | None = None

    def depart(self, rows: Tensor) -> Tensor:
        """Send rows, those for the first process first; return the argument of `arrive`."""
        departed: Tensor = Depart.apply(rows, self)
        return departed

    def arrive(self, departed: Tensor) -> Tensor:
        """Wait for the rows from all processes and return them."""
        received: Tensor = Arrive.apply(departed, self)
        return received

    def wait(self) -> Tensor:
        """Wait for the rows, return them, and drop the reference to them."""
        travelling, self.travelling = self.travelling, None
        assert travelling is not None
        travelling.work.wait()
        return travelling.received


class Depart(torch.autograd.Function):
    """Let rows depart; in the backward pass their gradients arrive."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.travelling = send(rows, exchange.num_sent, exchange.num_received, exchange.group)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.wait(), None


class Arrive(torch.autograd.Function):
    """Let rows arrive; in the backward pass their gradients depart."""

    @staticmethod
    def forward(ctx: Any, departed: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.wait()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        exchange = ctx.exchange
        exchange.travelling = send(gradient, exchange.num_received, exchange.num_sent, exchange.group)
        # autograd needs only the right shape here; `Depart.backward` waits for the contents
        return exchange.travelling.received, None


def send(rows: Tensor, num_sent: Sequence[int], num_received: Sequence[int], group: Any) -> Travelling:
    """Begin to send every process the next `num_sent` rows, and to receive `num_received` from it."""
    # zeros, since anomaly detection looks at gradients that have not arrived
    received = rows.new_zeros(sum(num_received), *rows.shape[1:])
    # flat tensors, since not every backend counts rows
    width = rows.shape[1:].numel()
    to_receive, to_send = ([count * width for count in each] for each in (num_received, num_sent))
    sent = rows.detach().reshape(-1)
    work = distributed.all_to_all_single(received.view(-1), sent, to_receive, to_send, group, async_op=True)
    return Travelling(received, sent, work)


def exchanged(rows: Tensor, num_sent: Sequence[int], num_received: Sequence[int], group: Any) -> Tensor:
    """Return the rows from all processes, after sending each the next `num_sent` rows; differentiable."""
    exchange = Exchange(num_sent, num_received, group)
    return exchange.arrive(exchange.depart(rows))


class Tie(torch.autograd.Function):
    """Return a tensor unchanged, and give others zero gradients, so that every process sends back gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, *others: Tensor) -> Tensor:
        ctx.save_for_backward(*others)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return gradient, *map(torch.zeros_like, ctx.saved_tensors)


# Sums and maxima over processes.


class SumOfProcesses(torch.autograd.Function):
    """The sum of a tensor over processes; in the backward pass, each process gets the sum of all gradients."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return summed(own, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return summed(gradient, ctx.group), None


def summed(own: Tensor, group: Any) -> Tensor:
    """Return the sum over processes."""
    total = own.detach().clone()
    distributed.all_reduce(total, group=group)
    return total


def largest(own: Tensor, group: Any) -> Tensor:
    """Return the elementwise maximum of a tensor over processes, without a gradient."""
    found = own.detach().clone()
    distributed.all_reduce(found, distributed.ReduceOp.MAX, group=group)
    return found
