"""Cases that are timed in a process of their own, as a model is used: alone with the memory of its process.

In one process the buffers that one model frees are those that the next one is given, which decides how many pages of
memory the system has to clear, and so the time of a step.
"""

import gc
import multiprocessing
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from hf_efficient_attn.bench.harness.timing import Case

PREPARE, RUN = "prepare", "run"


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
