"""Interleaved timing: every case once a round, so that a machine that slows down slows all of them.

`cases_apart` makes cases in a process of their own, as a model is used: alone with the memory of its process. In one
process the buffers that one model frees are those that the next one is given, which decides how many pages of memory
the system has to clear, and so the time of a step.
"""

import gc
import multiprocessing
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
from transformers.utils import logging

# rounds that are made however long they take
LEAST_ROUNDS = 2
PREPARE, RUN = "prepare", "run"


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
    cases: Mapping[Any, Case],
    repeats: int,
    device: torch.device,
    warmup: int = 1,
    description: str = "",
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Any, Timing]:
    """Return the timing of every case, all measured in the same rounds.

    A round runs each case once; each round starts at another case, so that none always follows the same neighbour. The
    garbage collector works between rounds only, and a CUDA device is waited for on both sides of the clock.

    Args:
        repeats, warmup: timed rounds, and rounds before them that are not counted.
        description: label of the progress bar.
        clock: returns seconds.
    """
    names = list(cases)
    seconds: dict[Any, list[float]] = {name: [] for name in names}
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
    cases: Mapping[Any, Case],
    repeats: int,
    max_seconds: float,
    description: str,
    device: torch.device,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Any, Timing]:
    """Return the timings of `LEAST_ROUNDS` rounds, and of as many more as fit into `max_seconds`, up to `repeats`."""
    start = clock()
    least = min(repeats, LEAST_ROUNDS)
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


@contextmanager
def cases_apart(
    build: Callable[..., dict[str, Case]], arguments: tuple[Any, ...], device: torch.device
) -> Iterator[dict[str, Case]]:
    """Provide the cases that `build(*arguments)` makes in a fresh process, which ends with the context.

    They are called as any other; the process is told to, over a pipe, which takes a tenth of a millisecond. On a CUDA
    device, whose memory torch manages, they are made in this process.

    Args:
        build: a function at the top of its module.

    Raises:
        RuntimeError: building failed there; the message ends with its error. The cases raise it, too.
    """
    if device.type != "cpu":
        yield build(*arguments)
        return
    context = fresh_processes()
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there, build, arguments, torch.get_num_threads()), daemon=True)
    process.start()
    there.close()
    try:
        yield {
            name: Case(partial(ask, here, RUN, name), partial(ask, here, PREPARE, name, None)) for name in receive(here)
        }
    finally:
        here.close()
        process.join()


def fresh_processes() -> Any:
    """Return what starts processes that have imported this package and done nothing else, where the system can."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def ask(connection: Connection, what: str, name: str, state: None) -> None:
    """Let the process of a case prepare or run it, and wait until it has."""
    connection.send((what, name))
    receive(connection)


def receive(connection: Connection) -> Any:
    """Return what the process answers.

    Raises:
        RuntimeError: it failed, or ended.
    """
    try:
        answer, error = connection.recv()
    except EOFError:
        raise RuntimeError("The process of a measurement ended early, as it does when memory runs out.") from None
    if error is not None:
        raise RuntimeError(f"A measurement failed in its process:\n{error}")
    return answer


def serve(
    connection: Connection, build: Callable[..., dict[str, Case]], arguments: tuple[Any, ...], num_threads: int
) -> None:
    """Make the cases and do what is asked for, until the other end is closed."""
    torch.set_num_threads(num_threads)
    cases: dict[str, Case] = {}
    states: dict[str, Any] = {}

    def start() -> list[str]:
        cases.update(build(*arguments))
        return list(cases)

    def prepare(name: str) -> None:
        gc.collect()
        states[name] = cases[name].prepare()

    def run(name: str) -> None:
        cases[name].run(states[name])

    answer(connection, start)
    gc.disable()
    while True:
        try:
            what, name = connection.recv()
        except EOFError:
            return
        answer(connection, partial(prepare if what == PREPARE else run, name))


def answer(connection: Connection, function: Callable[[], Any]) -> None:
    """Send what a function returns, or how it failed."""
    result, error = None, None
    try:
        result = function()
    except Exception:
        error = traceback.format_exc()
    connection.send((result, error))
