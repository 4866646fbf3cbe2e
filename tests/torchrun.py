"""Start a script in several processes that know each other, on gloo and CPU."""

import os
import subprocess
import sys
from pathlib import Path


def torchrun(script: Path, *arguments: str | Path, processes: int = 2, exit_code: int = 0) -> str:
    """Return what the processes printed, once all of them have ended; `processes` = 1: without any launcher.

    With another exit code than 0, what was printed as an error.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command = [sys.executable, *(launcher if processes > 1 else []), str(script), *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=250)
    assert done.returncode == exit_code, done.stderr
    return done.stdout if exit_code == 0 else done.stdout + done.stderr
