"""Two threads whose steps are told, not left to chance: what one does at every line of another."""

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

PACKAGE = "hf_efficient_attn"
# a thread that waits for a lock that the stopped one holds goes on after it
PATIENCE = 0.2


def at_every_line(first: Callable[[], Any], second: Callable[[], Any], module: str) -> Any:
    """Return `first()`, while another thread runs all of `second()` before every line of the package's `module`.

    Raises:
        Exception: what `second` raised.
    """
    raised: list[BaseException] = []
    waiting: list[threading.Thread] = []

    def run() -> None:
        try:
            second()
        except BaseException as error:  # handed on below
            raised.append(error)

    def step(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            thread = threading.Thread(target=run)
            thread.start()
            thread.join(PATIENCE)
            waiting.append(thread)
        return step

    def enter(frame: FrameType, event: str, _: Any) -> Any:
        return step if frame.f_globals.get("__name__") == f"{PACKAGE}.{module}" else None

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        result = first()
    finally:
        sys.settrace(before)
    for thread in waiting:
        thread.join()
    assert waiting, f"no line of {module} was run"
    if raised:
        raise raised[0]
    return result
