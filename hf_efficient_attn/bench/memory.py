"""Peak memory of a function, above what was held before it ran.

On a CPU every measurement has a process of its own, since a process never forgets its highest mark:
`python -m hf_efficient_attn.bench.memory FILE FUNCTION ARGUMENTS_IN_JSON` prints the bytes.
"""

import gc
import inspect
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

# the second call meets what the first leaves behind, such as the state of an optimizer
CALLS = 2
STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
# glibc then gives every freed tensor back at once: no mark depends on what was freed before, and where
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536"}


def peak_memory(build: Callable[..., Callable[[], object]], arguments: dict[str, Any], device: torch.device) -> int:
    """Return the bytes that the function made by `build(**arguments)` needs at its highest, beyond what `build` made.

    With a training step: gradients, optimizer state and activations, but not the weights.

    Args:
        build: a function at the top of its file, called in this process for CUDA, in a fresh one for a CPU.
        arguments: what `build` gets, in JSON types.

    Raises:
        RuntimeError: the fresh process failed; the message ends with its error.
    """
    if device.type == "cuda":
        return cuda_peak(build(**arguments), device)
    command = [sys.executable, "-m", "hf_efficient_attn.bench.memory"]
    command += [str(inspect.getsourcefile(build)), build.__qualname__, json.dumps(arguments)]
    process = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **ENVIRONMENT})
    if process.returncode != 0:
        raise RuntimeError(
            f"Measuring the memory of {build.__qualname__}(**{arguments}) failed with status {process.returncode} (-9: "
            f"killed, as when memory runs out):\n{process.stderr}"
        )
    return int(process.stdout.splitlines()[-1])


def cuda_peak(function: Callable[[], object], device: torch.device) -> int:
    """Return the peak bytes of tensors on the CUDA device while `function` runs, beyond those there before."""
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    for _ in range(CALLS):
        function()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def resident_peak(function: Callable[[], object]) -> int:
    """Return by how many bytes the highest mark of this process's resident memory rises while `function` runs."""
    forget_highest()
    before = highest_resident()
    for _ in range(CALLS):
        function()
    return highest_resident() - before


def forget_highest() -> None:
    """Lower the highest mark of this process to what it holds now, where the system can.

    Else what was built and dropped on the way, such as the source of a conversion, would hide as much of what follows.
    """
    gc.collect()
    if CLEAR_REFS.exists():
        CLEAR_REFS.write_text("5")


def highest_resident() -> int:
    """Return the highest resident memory of this process so far, in bytes.

    Linux hands `ru_maxrss` down from the process that started this one, so there the kernel's own mark is read.
    """
    if STATUS.exists():
        fields = dict(line.split(":", 1) for line in STATUS.read_text().splitlines() if ":" in line)
        if "VmHWM" in fields:
            return int(fields["VmHWM"].split()[0]) * 1024
    import resource

    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return highest if sys.platform == "darwin" else highest * 1024


def main(file: str, function: str, arguments: str) -> None:
    """Build what is measured, run it, and print the bytes."""
    # what lies beside a script is found as if it were run; a file of a package finds its package itself
    sys.path.append(str(Path(file).parent))
    build = runpy.run_path(file)[function]
    print(resident_peak(build(**json.loads(arguments))))


if __name__ == "__main__":
    main(*sys.argv[1:])
