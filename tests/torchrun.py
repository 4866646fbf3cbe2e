"""Start a script in several processes that know each other, on gloo and CPU."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from forked import server
from torch.distributed import TCPStore


def torchrun(script: Path, folder: Path) -> None:
    """Run it to the end by torchrun, with `folder` as its argument."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*launcher, script, folder], env=variables, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr


def run_together(script: Path, folder: Path, *options: str, processes: int = 2, exit_code: int = 0) -> str:
    """Run it as torchrun does, with `folder` as its argument, in seconds less; return what they printed.

    Args:
        exit_code: of the process that fails first; the others are then killed.
    """
    started, files, _store = start_together(script, folder, *options, processes=processes)
    codes = server().wait(started, 250)
    printed = "\n".join(file.read_text() for file in files)
    assert codes == [0] * processes if exit_code == 0 else exit_code in codes, printed
    return printed


def start_together(script: Path, folder: Path, *options: str, processes: int = 2) -> tuple[list[int], list[Path], Any]:
    """Start it as torchrun does; return the numbers of the processes, the files into which they print, and a store.

    The processes find each other by the store, as long as it is kept.
    """
    store: Any = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    files = [folder / f"printed_by_{rank}.txt" for rank in range(processes)]
    started = [
        server().start(
            [sys.executable, script, folder, *options], [file, file], env=environment(rank, processes, store)
        )
        for rank, file in enumerate(files)
    ]
    return started, files, store


def environment(rank: int, processes: int, store: Any) -> dict[str, str]:
    """Return the variables that torchrun sets, whose agent has the store."""
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": store.port}
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": 0}
    together = {name: str(value) for name, value in {**numbers, **address, **agent}.items()}
    return {**alone, **together} if processes > 1 else alone
