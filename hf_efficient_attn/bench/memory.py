"""Measure the peak memory of a function beyond the memory that was in use before it ran.

On a CPU every measurement has a process of its own, because not every system can reset the peak of a process:
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

# the second call includes what the first leaves behind, such as the state of an optimizer
CALLS = 2
STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
# glibc then returns every freed tensor to the system at once, so that peaks do not depend on what was freed before
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536"}


def peak_memory(build: Callable[..., Callable[[], object]], arguments: dict[str, Any], device: torch.device) -> int:
    """Return the peak bytes of the function that `build(**arguments)` returns, beyond what `build` allocated.

    For a training step: gradients, optimizer state and activations, but not the weights.

    Args:
        build: a function at the top level of its file, called in this process for CUDA, in a fresh one for a CPU.
        arguments: arguments of `build`, in JSON types.

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
            f"killed, for example because memory ran out):\n{process.stderr}"
        )
    return int(process.stdout.splitlines()[-1])


def cuda_peak(function: Callable[[], object], device: torch.device) -> int:
    """Return the peak bytes of tensors on the CUDA device while `function` runs, beyond those allocated before."""
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    for _ in range(CALLS):
        function()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def resident_peak(function: Callable[[], object]) -> int:
    """Return by how many bytes the peak resident memory of this process rises while `function` runs."""
    forget_highest()
    before = highest_resident()
    for _ in range(CALLS):
        function()
    return highest_resident() - before


def forget_highest() -> None:
    """Reset the peak of this process to its current memory, if the system supports it.

    Otherwise what was built and freed before, such as the source of a conversion, would hide part of the next peak.
    """
    gc.collect()
    if CLEAR_REFS.exists():
        CLEAR_REFS.write_text("5")


def highest_resident() -> int:
    """Return the peak resident memory of this process so far, in bytes.

    On Linux a process inherits `ru_maxrss` from the process that started it, so the peak is read from /proc there.
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
    # so that a script finds the modules next to it, as if it were run
    sys.path.append(str(Path(file).parent))
    build = runpy.run_path(file)[function]
    print(resident_peak(build(**json.loads(arguments))))


if __name__ == "__main__":
    main(*sys.argv[1:])
