"""The machine at hand: the costs by which backends and lengths of blocks are chosen, and where they come from.

They are those that the user has measured here (`hf-efficient-attn bench calibrate`), or else those of the most similar
machine that is known. They decide how attention is computed, never what.
"""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from hf_efficient_attn.backends.machines.costs import Costs, dtype_of_kernel
from hf_efficient_attn.backends.machines.known import KNOWN
from hf_efficient_attn.backends.machines.machine import Machine
from hf_efficient_attn.backends.machines.processor import Processor, processor_of
from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.layout.call import AttentionCall

# names another file of the user's own measurements
VARIABLE = "HF_EFFICIENT_ATTN_MACHINES"

# the innermost `on_machine` block comes last
_pretended: list[Machine] = []


def costs_of(call: AttentionCall) -> Costs:
    """Return what a call costs on the device of its inputs."""
    return machine_of(call.inputs.device).costs_in(str(dtype_of_kernel(call)).removeprefix("torch."))


def machine_of(device: str) -> Machine:
    """Return the machine whose costs are used for a type of device."""
    return _pretended[-1] if _pretended else _found(device)


@contextmanager
def on_machine(machine: Machine) -> Iterator[None]:
    """Choose lengths of blocks, and backends for calls unlike any before, as on another machine, in all threads."""
    _pretended.append(machine)
    try:
        yield
    finally:
        _pretended.remove(machine)


@lru_cache
def _found(device: str) -> Machine:
    processor = processor_of(device)
    # one without a name stands for every machine
    models = (processor, Processor(device, ""))
    own = [each for each in measured() if any(map(each.processor.is_model_of, models))]
    return nearest(processor, own or KNOWN)


def nearest(processor: Processor, machines: Sequence[Machine] = KNOWN) -> Machine:
    """Return the machine, of those that are known, that is most like a processor; the first of several."""
    return max(machines, key=lambda machine: machine.processor.likeness(processor))


def path_of_measured() -> Path:
    """Return the file of the machines that the user has measured, in the cache of the user."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get(VARIABLE) or cache / "hf_efficient_attn" / "machines.json")


def measured() -> list[Machine]:
    """Return the machines that the user has measured: several may share a home.

    Raises:
        ConfigurationError: the file is not one that `remember` has written.
    """
    path = path_of_measured()
    if not path.is_file():
        return []
    try:
        return [Machine.from_dict(each) for each in json.loads(path.read_text(encoding="utf-8"))]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(
            f"{path} does not hold the costs of machines as 'hf-efficient-attn bench calibrate' writes them "
            f"({type(error).__name__}: {error}). Delete it, or name another file in {VARIABLE}."
        ) from error


def remember(machine: Machine) -> Path:
    """Write a machine into the file of the user's, in place of an earlier measurement; return the file."""
    others = [each for each in measured() if each.processor != machine.processor]
    path = path_of_measured()
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    unfinished.write_text(
        json.dumps([each.to_dict() for each in [*others, machine]], indent=1) + "\n", encoding="utf-8"
    )
    unfinished.replace(path)
    _found.cache_clear()
    return path
