"""Scripts in other processes, forked from this one, which has imported what they need: each saves seconds.

A fork runs a script as `python SCRIPT …`, `python -m MODULE …` or `python -c CODE …` would: as `__main__`, with a
working directory, an environment and output files of its own. Variables that other libraries than huggingface_hub read
when they are imported come too late for it; a script that needs them is run by `run_fresh`.
"""

import importlib
import logging
import os
import runpy
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import huggingface_hub.hf_api
import torch
from torch.distributed import TCPStore, distributed_c10d

# a process that has used CUDA cannot be forked
CONTEXT = torch.multiprocessing.get_context("spawn" if torch.cuda.is_available() else "fork")


class Script:
    """A script that has been started; as far as tests need it, a `subprocess.Popen`."""

    def __init__(self, command: Sequence[Any], stdout: Path, stderr: Path, cwd: Any = None, env: Any = None) -> None:
        assert command[0] == sys.executable, command
        environment = {**(os.environ if env is None else env)}
        arguments = ([*map(str, command[1:])], stdout, stderr, str(cwd or os.getcwd()), environment)
        self.process, self.stdout = CONTEXT.Process(target=_run, args=arguments), stdout
        with warnings.catch_warnings():
            # of a process that has threads; none of those here holds a lock that a script needs
            warnings.simplefilter("ignore")
            self.process.start()

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def communicate(self, timeout: float = 280) -> tuple[str, None]:
        """Return what it printed, once it has ended; it is killed after `timeout` seconds."""
        self.process.join(timeout)
        if self.returncode is None:
            self.kill()
        return self.stdout.read_text(), None

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def start_script(command: Sequence[Any], printed: Path, cwd: Any = None, env: Any = None) -> Script:
    """Start `[sys.executable, SCRIPT or "-m" or "-c", …]`, which prints into a file."""
    return Script(command, printed, printed, cwd, env)


def run_script(command: Sequence[Any], cwd: Any = None, env: Any = None, timeout: float = 280, **_: Any) -> Any:
    """Do what `subprocess.run` does with `capture_output=True, text=True`."""
    with tempfile.TemporaryDirectory() as folder:
        stdout, stderr = Path(folder) / "stdout", Path(folder) / "stderr"
        script = Script(command, stdout, stderr, cwd, env)
        script.communicate(timeout)
        return subprocess.CompletedProcess(command, script.returncode, stdout.read_text(), stderr.read_text())


def run_fresh(
    command: Sequence[Any], cwd: Any = None, env: Any = None, timeout: float = 280
) -> subprocess.CompletedProcess:
    """Run a command in a process that has imported nothing yet."""
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout)


def run_distributed(script: Path, *arguments: Any, world_size: int = 2, exit_code: int = 0) -> str:
    """Run a script in processes that know each other (gloo, CPU), as torchrun does; return what they printed.

    Args:
        arguments: of the script, the first of which is a folder, where the processes also print into files.
        exit_code: of the process that fails first; the others are then killed.
    """
    scripts, _store = start_distributed([sys.executable, script, *arguments], arguments[0], world_size)
    end = time.monotonic() + 250
    while time.monotonic() < end and any(each.process.is_alive() for each in scripts):
        if any(each.returncode for each in scripts):
            break
        time.sleep(0.005)
    for each in scripts:
        each.kill()
    codes = [each.returncode for each in scripts]
    printed = "\n".join(each.communicate()[0] for each in scripts)
    assert codes == [0] * world_size if exit_code == 0 else exit_code in codes, printed
    return printed


def start_distributed(
    command: Sequence[Any], folder: Path, world_size: int = 2, env: Any = None
) -> tuple[list[Script], TCPStore]:
    """Start a script in several processes; return them and the store by which they find each other; keep it."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    scripts = []
    for rank in range(world_size):
        variables = {**(os.environ if env is None else env), "OMP_NUM_THREADS": "1"}
        if world_size > 1:
            numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
            agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": 0}
            address = {"MASTER_ADDR": "localhost", "MASTER_PORT": store.port}
            variables |= {name: str(value) for name, value in {**numbers, **agent, **address}.items()}
        scripts.append(start_script(command, folder / f"printed_by_{rank}.txt", folder, variables))
    return scripts, store


def _run(arguments: list[str], stdout: Path, stderr: Path, cwd: str, env: dict[str, str]) -> None:
    """Run a script as `__main__` of this process, a fork."""
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    _print_into(stdout, stderr)
    _be_as_new()
    sys.argv = arguments
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in sys.path]
    if arguments[0] == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = arguments[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        exec(compile(sys.argv.pop(1), "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.path.insert(0, str(Path(arguments[0]).parent))
        runpy.run_path(arguments[0], run_name="__main__")


def _print_into(stdout: Path, stderr: Path) -> None:
    """Let all that prints in this process, loggers among it, print into files."""
    for number, file in enumerate((os.devnull, stdout, stderr)):
        os.dup2(os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_TRUNC), number)
    # what pytest captured is not this process's
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w", buffering=1), open(2, "w", buffering=1)  # noqa: SIM115
    for reference in logging._handlerList:
        handler = reference()
        if type(handler) is logging.StreamHandler:
            # `setStream` would flush the stream of before, which may be closed
            handler.stream = sys.stderr
            handler.flush = sys.stderr.flush


def _be_as_new() -> None:
    """Undo what the tests of the parent have changed, and what would keep a process from ending."""
    warnings.resetwarnings()
    warnings.simplefilter("default")
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category)
    # transformers' collators ask by this name whether they are in a worker of a DataLoader
    CONTEXT.current_process().name = "MainProcess"
    # which read the environment; who calls the Hub asks them, or this object
    importlib.reload(huggingface_hub.constants)
    huggingface_hub.hf_api.api.endpoint = huggingface_hub.constants.ENDPOINT
    huggingface_hub.close_session()
    # what reads numbers of processes, or folders of examples, when it is imported
    for name, module in [*sys.modules.items()]:
        if name.endswith("_script") or "/examples/" in (getattr(module, "__file__", None) or ""):
            del sys.modules[name]
    # Trainer of transformers 5.17 asks for "cpu:0" where processes resume on CPUs, a place that torch does not know
    torch.serialization.register_package(
        11, lambda storage: None, lambda storage, place: storage if place == "cpu:0" else None
    )
    destroy, kept = torch.distributed.destroy_process_group, []

    def destroy_and_keep(group: Any = None) -> None:
        # DistributedDataParallel, where it goes last, deletes the groups while it holds Python's lock: it waits for a
        # thread of gloo, and that thread, where it still has a tensor to delete, for the lock
        kept.extend(distributed_c10d._world.pg_map)
        destroy(group)

    torch.distributed.destroy_process_group = destroy_and_keep
