"""Scripts in processes that have imported everything before they start, which saves seconds for each of them.

A server, this file run as a script, imports what scripts import, once for all workers of a session, and forks itself
for every script. A fork does what `python SCRIPT …`, `python -m MODULE …` or `python -c CODE …` would: it runs as
`__main__`, in a folder and an environment of its own, and prints into files. What it starts by `subprocess.run` is
forked, too, from a process that has not run the script. Variables that libraries read as they are imported, such as
HF_ENDPOINT, come too late for it; a script that needs them asks `server("forked_torch_imports")`, whose forks import
huggingface_hub anew.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, TextIO

# what is imported, the later on top of the earlier
IMPORTS = ("forked_torch_imports", "forked_imports")
SECONDS_TO_IMPORT = 200


class Server:
    """Streams to and from a process in which `serve` runs."""

    def __init__(self, orders: TextIO, answers: TextIO) -> None:
        self.orders, self.answers = orders, answers

    def ask(self, **order: Any) -> Any:
        print(json.dumps(order), file=self.orders, flush=True)
        return json.loads(self.answers.readline())

    def start(self, words: Sequence[Any], files: Sequence[Path], cwd: Any = None, env: Any = None) -> int:
        """Start `[sys.executable, SCRIPT or "-m" or "-c", …]`; return the number of its process.

        Args:
            files: where it prints, and where it prints errors.
        """
        assert words[0] == sys.executable, words
        folder, environment = str(cwd or os.getcwd()), dict(os.environ if env is None else env)
        return self.ask(start=[*map(str, words[1:])], files=[*map(str, files)], folder=folder, environment=environment)

    def wait(self, processes: Sequence[int], seconds: float) -> list[int]:
        """Return the exit codes, once all have ended; where one fails, or takes longer, the others are killed."""
        return self.ask(wait=processes, seconds=seconds)

    def run(self, words: Sequence[Any], cwd: Any = None, env: Any = None, timeout: float = 280, **_: Any) -> Any:
        """Do what `subprocess.run` does with `capture_output=True, text=True`."""
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder) / name for name in ("stdout", "stderr")]
            (code,) = self.wait([self.start(words, files, cwd, env)], timeout)
            return subprocess.CompletedProcess(words, code, *(file.read_text() for file in files))


@cache
def server(imports: str = "forked_imports") -> Server:
    """Return the server of this session that has imported a module; it ends with the session."""
    addresses, deadline = started_servers(), time.monotonic() + SECONDS_TO_IMPORT
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(str(addresses / imports))
            # the end of this process closes it
            atexit.register(connection.detach)
            return Server(connection.makefile("w"), connection.makefile("r"))
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
            assert time.monotonic() < deadline, f"{imports} is not served"
            time.sleep(0.05)


@cache
def started_servers() -> Path:
    """Return the folder with the addresses of this session's servers, which the first of its workers starts."""
    # of which pytest is the parent
    together = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    session = os.getppid() if together else os.getpid()
    folder = Path(tempfile.gettempdir()) / f"forked-{together or time.time_ns()}"
    try:
        folder.mkdir()
    except FileExistsError:
        return folder
    subprocess.run([sys.executable, __file__, str(session), folder], check=True)
    return folder


class Forked:
    """A script that has been started; as far as tests need it, a `subprocess.Popen`."""

    def __init__(self, words: Sequence[Any], printed: Path, cwd: Path, env: dict[str, str]) -> None:
        self.printed = printed
        self.process = server().start(words, [printed, printed], cwd, env)
        self.returncode: int | None = None

    def communicate(self, timeout: float) -> tuple[str, None]:
        """Return what it printed, once it has ended."""
        (self.returncode,) = server().wait([self.process], timeout)
        return self.printed.read_text(), None


def serve(orders: TextIO, answers: TextIO) -> dict[str, Any] | None:
    """Follow orders until there are no more; in a process that is forked for one of them, return it."""
    for line in orders:
        order = json.loads(line)
        answer: Any = wait(order["wait"], order["seconds"]) if "wait" in order else os.fork()
        if answer == 0:
            return order
        print(json.dumps(answer), file=answers, flush=True)
    return None


def wait(processes: Sequence[int], seconds: float) -> list[int]:
    """See `Server.wait`."""
    codes: dict[int, int] = {}
    end = time.monotonic() + seconds
    while len(codes) < len(processes):
        for process in set(processes) - codes.keys():
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                codes[process] = os.waitstatus_to_exitcode(status)
            elif any(codes.values()) or time.monotonic() > end:
                os.kill(process, signal.SIGKILL)
        time.sleep(0.005)
    return [codes[process] for process in processes]


def run_to_the_end(order: dict[str, Any], server: Server) -> None:
    """Run a script and end this process without taking it down piece by piece, which takes two seconds."""
    code: Any = 1
    try:
        run_script(order, server)
        code = 0
    except SystemExit as stop:
        code = 0 if stop.code is None else stop.code
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def run_script(order: dict[str, Any], server: Server) -> None:
    """Run a script as `__main__` of this process."""
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    for stream, file in enumerate((os.devnull, *order["files"])):
        os.dup2(os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_TRUNC), stream)
    sys.stdout.reconfigure(line_buffering=True)
    subprocess.run = partial(run_forked, server, subprocess.run)
    sys.argv = order["start"]
    sys.path[1:1] = [path for path in os.environ["PYTHONPATH"].split(os.pathsep) if path not in sys.path]
    if sys.argv[0] == "-m":
        sys.path[0] = os.getcwd()
        sys.argv = sys.argv[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    elif sys.argv[0] == "-c":
        exec(compile(sys.argv.pop(1), "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.path[0] = str(Path(sys.argv[0]).parent)
        runpy.run_path(sys.argv[0], run_name="__main__")


def run_forked(server: Server, run: Callable, words: Sequence[Any], *arguments: Any, **options: Any) -> Any:
    """Take the place of `subprocess.run`."""
    is_ours = words[0] == sys.executable and options.get("capture_output") and options.get("text")
    return server.run(words, **options) if is_ours else run(words, *arguments, **options)


def follow(orders: TextIO, answers: TextIO) -> None:
    """Be a server, then its forks, and the servers of these."""
    order = serve(orders, answers)
    while order is not None:
        (read_order, write_order), (read_answer, write_answer) = os.pipe(), os.pipe()
        if os.fork() == 0:
            for end in (write_order, read_answer):
                os.close(end)
            order = serve(os.fdopen(read_order), os.fdopen(write_answer, "w"))
            continue
        for end in (read_order, write_answer):
            os.close(end)
        run_to_the_end(order, Server(os.fdopen(write_order, "w"), os.fdopen(read_answer)))


def listen(address: Path, session: int) -> None:
    """Fork a server for every process that connects, until the session, a process, has ended."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(address))
        listener.listen()
        listener.settimeout(0.5)
        while is_running(session):
            with suppress(TimeoutError):
                connection, _ = listener.accept()
                if os.fork() == 0:
                    listener.close()
                    return follow(connection.makefile("r"), connection.makefile("w"))
                connection.close()
            with suppress(ChildProcessError):
                os.waitpid(-1, os.WNOHANG)
    address.unlink()
    with suppress(OSError):
        address.parent.rmdir()


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def main(session: int, addresses: Path) -> None:
    """Listen with a part of the imports, and in another process with more of them."""
    for imports in IMPORTS:
        importlib.import_module(imports)
        gc.freeze()
        if imports == IMPORTS[-1] or os.fork() > 0:
            return listen(addresses / imports, session)


if __name__ == "__main__":
    # who started it need not wait
    if os.fork() == 0:
        main(int(sys.argv[1]), Path(sys.argv[2]))
        # as scripts do, see `run_to_the_end`: every script leaves a server behind
        os._exit(0)
