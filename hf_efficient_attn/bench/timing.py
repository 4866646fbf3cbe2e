"""Interleaved timing: every case runs once per round, so that a machine that slows down slows all of them.

`cases_apart` builds cases in a process of their own, because a model is usually alone in its process. In one process, a
model gets the buffers that another model has freed, which changes how many pages of memory the system has to clear, and
so the time of a step.
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

# rounds that are run however long they take
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

    def duration(self, units: float) -> dict[str, float]:
        """Return milliseconds per unit if one repeat handles `units`; see `summarize`."""
        return summarize([1000 * seconds / units for seconds in self.seconds])

    def record(self, units: float) -> dict[str, Any]:
        """Return "milliseconds" per unit as in `duration`, and "samples", the values of all repeats, in JSON types."""
        return {"milliseconds": self.duration(units), "samples": [1000 * each / units for each in self.seconds]}


def times_faster(own: Sequence[float], others: Sequence[float]) -> dict[str, float]:
    """Return how many times faster one case is than another, compared round by round; see `summarize`.

    >>> times_faster((1.0, 2.0, 1.0), (2.0, 4.0, 3.0))
    {'median': 2.0, 'first_quartile': 2.0, 'third_quartile': 2.5}
    """
    return summarize([other / mine for mine, other in zip(own, others, strict=True)])


def summarize(values: list[float]) -> dict[str, float]:
    """Return the median, the first quartile and the third quartile.

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

    A round runs each case once; each round starts with another case, so that no case is always the first. The garbage
    collector runs only between rounds, and a CUDA device is synchronized before and after each run.

    Args:
        repeats, warmup: number of timed rounds, and of rounds before them that do not count.
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
    """Return whether one CPU thread does all the work; then its processor time counts, unaffected by other programs."""
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
    """Time `LEAST_ROUNDS` rounds, and more if they fit into `max_seconds`, up to `repeats`; return the timings."""
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
    """Wait until a CUDA device has finished its work; do nothing for a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def cases_apart(
    build: Callable[..., dict[str, Case]], arguments: tuple[Any, ...], device: torch.device
) -> Iterator[dict[str, Case]]:
    """Provide the cases that `build(*arguments)` makes in a fresh process, which ends with the context.

    They are called like any other case; each call is sent over a pipe, which takes a tenth of a millisecond. On a CUDA
    device, whose memory torch manages, the cases are made in this process.

    Args:
        build: a function at the top level of its module.

    Raises:
        RuntimeError: building failed in the process; the message ends with its error. The cases can also raise it.
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
    """Return a multiprocessing context whose processes have only imported this module, if the system supports it."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def ask(connection: Connection, what: str, name: str, state: None) -> None:
    """Tell the process of a case to prepare or run it, and wait until it has finished."""
    connection.send((what, name))
    receive(connection)


def receive(connection: Connection) -> Any:
    """Return the answer of the process.

    Raises:
        RuntimeError: the process failed or ended.
    """
    try:
        answer, error = connection.recv()
    except EOFError:
        raise RuntimeError("The process of a measurement ended early, for example because memory ran out.") from None
    if error is not None:
        raise RuntimeError(f"A measurement failed in its process:\n{error}")
    return answer


def serve(
    connection: Connection, build: Callable[..., dict[str, Case]], arguments: tuple[Any, ...], num_threads: int
) -> None:
    """Build the cases, then prepare and run them on request until the other end of the pipe is closed."""
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
    """Send the result of a function, or the traceback of its error."""
    result, error = None, None
    try:
        result = function()
    except Exception:
        error = traceback.format_exc()
    connection.send((result, error))
