"""Interleaved timing: every case once a round, so that a machine that slows down slows all of them."""

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils import logging

# rounds that are made however long they take
LEAST_ROUNDS = 2


def nothing() -> None:
    """The preparation of a case that needs none."""


@dataclass(frozen=True)
class Case:
    """What is timed: `run(state)`, where `state` is what the untimed `prepare()` returned just before."""

    run: Callable[[Any], object]
    prepare: Callable[[], Any] = nothing


@dataclass(frozen=True)
class Timing:
    """Seconds of every repeat of one case, in the order of the rounds."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median time in seconds."""
        return statistics.median(self.seconds)

    def speed(self, units: float) -> dict[str, float]:
        """Return units per second, where one repeat handles `units`; see `summarize`."""
        return summarize([units / seconds for seconds in self.seconds])

    def duration(self, units: float) -> dict[str, float]:
        """Return milliseconds per unit, where one repeat handles `units`; see `summarize`."""
        return summarize([1000 * seconds / units for seconds in self.seconds])

    def record(self, units: float) -> dict[str, Any]:
        """Return "milliseconds" per unit, as `duration`, and "samples", the same of every repeat, in JSON types."""
        return {"milliseconds": self.duration(units), "samples": [1000 * each / units for each in self.seconds]}

    def speed_against(self, other: "Timing") -> dict[str, float]:
        """Return how many times faster this case is than `other`; see `times_faster`."""
        return times_faster(self.seconds, other.seconds)


def times_faster(own: Sequence[float], others: Sequence[float]) -> dict[str, float]:
    """Return how many times faster one is than another, from the times of their rounds, one by one; see `summarize`.

    >>> times_faster((1.0, 2.0, 1.0), (2.0, 4.0, 3.0))
    {'median': 2.0, 'first_quartile': 2.0, 'third_quartile': 2.5}
    """
    return summarize([other / mine for mine, other in zip(own, others, strict=True)])


def summarize(values: list[float]) -> dict[str, float]:
    """Return the median and the quartiles between which the middle half of the values lies.

    >>> summarize([4.0, 1.0, 2.0, 3.0])
    {'median': 2.5, 'first_quartile': 1.75, 'third_quartile': 3.25}
    """
    first, median, third = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return {"median": median, "first_quartile": first, "third_quartile": third}


def time_interleaved(
    cases: Mapping[str, Case],
    repeats: int,
    device: torch.device,
    warmup: int = 1,
    description: str = "",
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Return the timing of every case, all measured in the same rounds.

    A round runs each case once; each round starts at another case, so that none always follows the same neighbour. The
    garbage collector works between rounds only, and a CUDA device is waited for on both sides of the clock.

    Args:
        repeats, warmup: timed rounds, and rounds before them that are not counted.
        description: label of the progress bar.
        clock: returns seconds.
    """
    names = list(cases)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    rounds = logging.tqdm(range(-warmup, repeats), desc=description, unit="round", leave=False)
    for index in rounds:
        gc.collect()
        first = index % len(names)
        for name in names[first:] + names[:first]:
            elapsed = time_once(cases[name], device, clock)
            if index >= 0:
                seconds[name].append(elapsed)
    return {name: Timing(tuple(values)) for name, values in seconds.items()}


def counts_processor_time(device: torch.device) -> bool:
    """Return whether one thread of a CPU does all the work: then its own time counts, which others do not slow."""
    return device.type == "cpu" and torch.get_num_threads() == 1


def clock_of(device: torch.device) -> Callable[[], float]:
    """Return the clock of work that this process does on a device; see `counts_processor_time`."""
    return time.process_time if counts_processor_time(device) else time.perf_counter


def time_within(
    cases: dict[str, Case],
    repeats: int,
    max_seconds: float,
    tokens: int,
    device: torch.device,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Return the timings of `LEAST_ROUNDS` rounds, and of as many more as fit into `max_seconds`, up to `repeats`."""
    start = clock()
    least = min(repeats, LEAST_ROUNDS)
    description = f"{tokens:,} tokens"
    timings = time_interleaved(cases, least, device, warmup=0, description=description, clock=clock)
    elapsed = clock() - start
    more = min(repeats - least, int((max_seconds - elapsed) * least / elapsed))
    if more < 1:
        return timings
    others = time_interleaved(cases, more, device, warmup=0, description=description, clock=clock)
    return {name: Timing(timing.seconds + others[name].seconds) for name, timing in timings.items()}


def time_once(case: Case, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds that one run of `case` takes, until `device` has finished."""
    state = case.prepare()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        synchronize(device)
        start = clock()
        case.run(state)
        synchronize(device)
        return clock() - start
    finally:
        if was_enabled:
            gc.enable()


def synchronize(device: torch.device) -> None:
    """Wait until `device` has finished all work given to it. A CPU always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
