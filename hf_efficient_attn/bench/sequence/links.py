"""A link between processes that counts what goes over it, and that can be as slow as one between machines."""

import time
from dataclasses import dataclass
from typing import Any

from torch import Tensor, distributed


@dataclass
class Arrival:
    """An exchange on its way over a link; `wait` returns when it has arrived."""

    work: Any
    at: float

    def wait(self) -> None:
        """Wait for the processes, and then for the link."""
        self.work.wait()
        time.sleep(max(0.0, self.at - time.perf_counter()))


class Link:
    """Takes the place of torch's exchange in this process, and counts the bytes that it sends to others.

    Args:
        gigabits: what the link of each process carries per second, each way; 0: as fast as the processes are.
        is_waiting: whether whoever sends waits until all has arrived, instead of computing meanwhile.
    """

    def __init__(self, gigabits: float, is_waiting: bool = False) -> None:
        self.gigabits, self.is_waiting = gigabits, is_waiting
        self.sent = self.received = self.reduced = 0

    def __enter__(self) -> "Link":
        self.plain = distributed.all_to_all_single, distributed.all_reduce
        distributed.all_to_all_single, distributed.all_reduce = self.exchange, self.reduce  # type: ignore[assignment]
        return self

    def __exit__(self, *error: Any) -> None:
        distributed.all_to_all_single, distributed.all_reduce = self.plain

    def exchange(
        self, out: Tensor, rows: Tensor, received: list[int], sent: list[int], group: Any, **how: Any
    ) -> Arrival:
        """Do what `all_to_all_single` does."""
        rank, start = distributed.get_rank(group), time.perf_counter()
        num_sent, num_received = ((sum(each) - each[rank]) * rows.element_size() for each in (sent, received))
        self.sent, self.received = self.sent + num_sent, self.received + num_received
        seconds = 8 * max(num_sent, num_received) / (self.gigabits * 1e9) if self.gigabits else 0.0
        arrival = Arrival(self.plain[0](out, rows, received, sent, group, **how), start + seconds)
        if self.is_waiting:
            arrival.wait()
        return arrival

    def reduce(self, tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        """Do what `all_reduce` does; it is small, and not slowed down."""
        self.reduced += tensor.numel() * tensor.element_size()
        return self.plain[1](tensor, *arguments, **options)
