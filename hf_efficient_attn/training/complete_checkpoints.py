"""Checks that checkpoints of `Trainer` are complete, and the files in them with a model's memory of past segments.

A process that is killed while it saves leaves an incomplete checkpoint.
"""

import json
import os
import pickle
import pickletools
import re
import zipfile
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import (
    ADAPTER_SAFE_WEIGHTS_NAME,
    ADAPTER_WEIGHTS_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)

from hf_efficient_attn.errors import CheckpointError
from hf_efficient_attn.models.spans.memory import SegmentMemory

NUMBERED = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)")
STATE = "trainer_state.json"
ARGUMENTS = "training_args.bin"
WHOLE_WEIGHTS = (SAFE_WEIGHTS_NAME, WEIGHTS_NAME, ADAPTER_SAFE_WEIGHTS_NAME, ADAPTER_WEIGHTS_NAME)
INDICES = (SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME)
# FSDP writes folders, in which .metadata is written last, or one file; DeepSpeed writes a folder, then names it in the
# file `latest`
FSDP_WEIGHTS, FSDP_OPTIMIZER, FSDP_END = "pytorch_model_fsdp", "optimizer", ".metadata"
DEEPSPEED_END = "latest"
OPTIMIZERS = ("optimizer.pt", "optimizer.bin")
SCHEDULER = "scheduler.pt"
RANDOM = re.compile(r"rng_state(?:_(\d+))?\.pth")
ALONE = -1
SHARD = re.compile(r"__(\d+)_\d+\.distcp")
FIELDS = set(vars(SegmentMemory()))
OUTSIDE = "For a checkpoint outside of output_dir, also set args.resume_from_checkpoint to it."


def last_complete_checkpoint(output_dir: str | os.PathLike[str]) -> str | None:
    """Return the last checkpoint-N from which training can resume exactly; None: there is none.

    transformers' `get_last_checkpoint`, and therefore `resume_from_checkpoint=True`, take the highest N even if saving
    was interrupted and the folder is incomplete. Write instead:

        trainer.train(resume_from_checkpoint=hea.training.last_complete_checkpoint(args.output_dir))

    Training then starts from the beginning if there is no complete checkpoint. A checkpoint is complete if these files
    are whole: `trainer_state.json`; the weights (one file, or all shards of an index; adapters of PEFT; folders of FSDP
    and DeepSpeed); optimizer, scheduler and the random states of all processes, except with `save_only_model=True`; and
    the `segment_memory` of every process, if `SpanCallback` announced it. `training_args.bin` says how many processes
    there were; with `save_on_each_node=True` the files of other nodes are not checked. Headers and lengths are
    compared, but no tensor is loaded. Two cases are not detected: files that changed without a change of length, and a
    checkpoint that a later run has partly overwritten.

    Args:
        output_dir: the `output_dir` of `TrainingArguments`; it need not exist.
    """
    return next((str(folder) for folder in _newest_first(Path(output_dir)) if why_incomplete(folder) is None), None)


def checkpoint_before(folder: Path) -> str | None:
    """Return the last complete checkpoint in the same directory with a lower number than `folder`; None: none."""
    number = _number(folder)
    others = [each for each in _newest_first(folder.parent) if number is not None and (_number(each) or 0) < number]
    return next((str(each) for each in others if why_incomplete(each) is None), None)


def why_incomplete(folder: Path) -> str | None:
    """Return why training cannot resume from a checkpoint, as a sentence that begins with a file; None: it can."""
    state = _read_json(folder / STATE)
    if state is None:
        return f"{STATE} is missing or truncated."
    for check in (_why_no_weights, _why_no_optimizer, _why_no_random_states):
        reason = check(folder)
        if reason is not None:
            return reason
    here = _processes_here(folder)
    for process, name in enumerate(memory_files(state)):
        if (process in here or here == {ALONE}) and not (folder / name).is_file():
            return f"{name} is missing."
    for file in sorted(folder.rglob("*")):
        if file.suffix in (SAFETENSORS, *ZIPS):
            reason = why_not_whole(file)
            if reason is not None:
                return f"{file.relative_to(folder)} {reason}."
    return None


def memory_files(state: dict[str, Any]) -> list[str]:
    """Return the memory files that `SpanCallback` announced in a trainer_state.json, one per process."""
    files = (_announced(state) or {}).get("memory_files")
    return [name for name in files if isinstance(name, str)] if isinstance(files, list) else []


def _announced(state: dict[str, Any]) -> dict[str, Any] | None:
    """Return the attributes that `SpanCallback` has saved in a trainer_state.json; None: there are none."""
    callbacks = state.get("stateful_callbacks")
    entries = [] if not isinstance(callbacks, dict) else list(callbacks.values())
    attributes = [entry.get("attributes") for entry in entries if isinstance(entry, dict)]
    return next((each for each in attributes if isinstance(each, dict) and "memory_files" in each), None)


def _newest_first(output_dir: Path) -> list[Path]:
    if not output_dir.is_dir():
        return []
    numbered = [(number, each) for each in output_dir.iterdir() if (number := _number(each)) is not None]
    return [each for _, each in sorted(numbered, reverse=True) if each.is_dir()]


def _number(folder: Path) -> int | None:
    match = NUMBERED.fullmatch(folder.name)
    return None if match is None else int(match[1])


def _read_json(file: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _why_no_weights(folder: Path) -> str | None:
    """Return why weights are missing, or None; of their files, only the shards of an index are checked to be whole."""
    indices = [folder / name for name in INDICES if (folder / name).exists()]
    for index in indices:
        reason = _why_no_shards(index)
        if reason is not None:
            return reason
    fsdp = [each for each in folder.glob(f"{FSDP_WEIGHTS}*") if each.is_dir()]
    for each in fsdp:
        if not (each / FSDP_END).is_file():
            return f"{each.name}/{FSDP_END} is missing."
    if _is_deepspeed(folder):
        return _why_no_deepspeed(folder)
    files = any((folder / name).is_file() for name in WHOLE_WEIGHTS) or any(folder.glob(f"{FSDP_WEIGHTS}*.bin"))
    # if there are several adapters, each has a folder
    adapters = any(folder.glob(f"*/{ADAPTER_SAFE_WEIGHTS_NAME}")) or any(folder.glob(f"*/{ADAPTER_WEIGHTS_NAME}"))
    return None if indices or fsdp or files or adapters else f"{SAFE_WEIGHTS_NAME} is missing."


def _why_no_shards(index: Path) -> str | None:
    places = (_read_json(index) or {}).get("weight_map")
    if not isinstance(places, dict) or not places:
        return f"{index.name} is truncated."
    for name in sorted(set(map(str, places.values()))):
        reason = why_not_whole(index.parent / name)
        if reason is not None:
            return f"{name} {reason}."
        promised = {tensor for tensor, place in places.items() if place == name}
        if name.endswith(SAFETENSORS) and not promised <= tensor_names(index.parent / name):
            return f"{name} lacks tensors that {index.name} lists."
    return None


def _is_deepspeed(folder: Path) -> bool:
    return (folder / DEEPSPEED_END).exists() or any(folder.glob("global_step*"))


def _why_no_deepspeed(folder: Path) -> str | None:
    end = folder / DEEPSPEED_END
    name = end.read_text(encoding="utf-8", errors="replace").strip() if end.is_file() else ""
    if not name or "/" in name:
        return f"{DEEPSPEED_END} is missing or truncated."
    return None if any((folder / name).glob("*_states.pt")) else f"{name}/*_states.pt is missing."


def _why_no_optimizer(folder: Path) -> str | None:
    if _is_deepspeed(folder) or _argument(folder, "save_only_model") is True:
        return None
    sharded = [each for each in folder.glob(f"{FSDP_OPTIMIZER}_*") if each.is_dir()]
    for each in sharded:
        if not (each / FSDP_END).is_file():
            return f"{each.name}/{FSDP_END} is missing."
    if not sharded and not any((folder / name).is_file() for name in OPTIMIZERS):
        return f"{OPTIMIZERS[0]} is missing."
    return None if (folder / SCHEDULER).is_file() else f"{SCHEDULER} is missing."


def _why_no_random_states(folder: Path) -> str | None:
    if _argument(folder, "save_only_model") is True:
        return None
    missing = sorted(_processes_here(folder) - _random_states(folder))
    if not missing:
        return None
    return f"rng_state{'' if missing[0] == ALONE else f'_{missing[0]}'}.pth is missing."


def _random_states(folder: Path) -> set[int]:
    """Return the numbers of the processes whose random states were saved; the file of a single process is ALONE."""
    found = (RANDOM.fullmatch(each.name) for each in folder.iterdir())
    return {ALONE if match[1] is None else int(match[1]) for match in found if match is not None}


def _processes_here(folder: Path) -> set[int]:
    """Return the numbers of the processes whose files belong in this folder.

    The saved arguments say how many processes there were. FSDP with shards saves no arguments, but a shard per process.
    """
    found, num_processes = _random_states(folder), _argument(folder, "num_processes")
    if num_processes == 1 or (num_processes is None and found <= {ALONE}):
        return {ALONE}
    numbers = found - {ALONE}
    if _argument(folder, "save_on_each_node") is True and numbers:
        # the processes of a node have consecutive numbers; the files of other nodes are elsewhere
        return set(range(min(numbers), max(numbers) + 1))
    if num_processes is None:
        shards = (SHARD.fullmatch(each.name) for each in folder.rglob("*.distcp"))
        num_processes = 1 + max(1, *numbers, *(int(match[1]) for match in shards if match is not None))
    return set(range(num_processes))


def _argument(folder: Path, name: str) -> int | None:
    """Return an integer or bool from the saved arguments of a checkpoint, whose pickle is scanned but not loaded.

    None: the arguments do not have it.
    """
    try:
        with zipfile.ZipFile(folder / ARGUMENTS) as archive:
            file = next(each for each in archive.namelist() if each.endswith("data.pkl"))
            values = _values(archive.read(file))
            following = (next(values, None) for value in values if value == name)
            return next((each for each in following if isinstance(each, int)), None)
    except (OSError, zipfile.BadZipFile, StopIteration, ValueError, KeyError):
        return None


def _values(pickled: bytes) -> Iterator[Any]:
    for operation, argument, _ in pickletools.genops(pickled):
        if operation.name in ("NEWTRUE", "NEWFALSE"):
            yield operation.name == "NEWTRUE"
        elif not operation.name.endswith("PUT") and operation.name != "MEMOIZE":
            yield argument


def file_names(args: TrainingArguments) -> list[str]:
    """Return the names of the memory files of all processes."""
    return [_name(process) for process in range(args.world_size)]


def write_memory(memory: SegmentMemory, args: TrainingArguments, state: TrainerState) -> str | None:
    """Write the memory file of this process atomically into the checkpoint of this step, if the folder exists.

    Returns the hash of the file, by which `read_memory` knows it from that of another training; None: there is none.
    """
    file = _folder(args, state) / _name(args.process_index)
    if not file.parent.is_dir():
        return None
    partial = file.with_name(f".{file.name}.partial")
    with partial.open("wb") as stream:
        torch.save(vars(memory), stream)
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(file)
    return _hash(file)


def _hash(file: Path) -> str:
    return sha256(file.read_bytes()).hexdigest()


def read_memory(memory: SegmentMemory, args: TrainingArguments, state: TrainerState) -> None:
    """Fill the memory from the file of this process; empty it if the checkpoint was saved without one.

    The checkpoint is the one named in the arguments, or else the checkpoint of this step in `output_dir`, since Trainer
    does not tell callbacks what `train(resume_from_checkpoint=...)` names.

    Raises:
        CheckpointError: the file is damaged, is of another training, or was announced and is missing.
    """
    saved = {"stateful_callbacks": state.stateful_callbacks}
    announced, attributes = memory_files(saved), _announced(saved)
    if attributes is not None and not announced:
        memory.clear()
        return
    folders = [_folder(args, state)]
    if isinstance(args.resume_from_checkpoint, str) and Path(args.resume_from_checkpoint).is_dir():
        folders.insert(0, Path(args.resume_from_checkpoint))
    files = [folder / _name(args.process_index) for folder in folders]
    there = [each for each in files if each.is_file()]
    # of the first process, which writes the state, the hash is known
    step, known = (attributes or {}).get("memory_written") or (None, None)
    is_known = args.process_index == 0 and step == state.global_step
    file = next((each for each in there if not is_known or _hash(each) == known), None)
    if there and file is None:
        raise CheckpointError(
            f"{there[0]} is not what the checkpoint that was given to train() has saved: it is damaged, or of another "
            f"training. {OUTSIDE} If it is damaged: {_what_to_do(there[0])}"
        )
    if file is not None:
        vars(memory).update(_load(file, args.device))
        return
    if announced:
        raise CheckpointError(
            f"{files[0]}, one of {len(announced)} memory files of the checkpoint, is missing. Training cannot resume "
            f"in the middle of a text without the memory of its processes. {OUTSIDE} Use the same number of processes "
            f"as before. If the file is lost: {_what_to_do(files[0])}"
        )


def _load(file: Path, device: torch.device) -> dict[str, Any]:
    try:
        content = torch.load(file, map_location=device, weights_only=True)
    except (OSError, RuntimeError, ValueError, KeyError, EOFError, pickle.PickleError) as error:
        raise CheckpointError(f"{file} is damaged and cannot be read. {_what_to_do(file)}") from error
    if not isinstance(content, dict) or content.keys() != FIELDS:
        raise CheckpointError(f"{file} was not written by SpanCallback. {_what_to_do(file)}")
    return content


def _what_to_do(file: Path) -> str:
    before = checkpoint_before(file.parent)
    if before is None:
        return "There is no earlier complete checkpoint: train from the start."
    return f"Resume from the last complete checkpoint before this one, next to it: {Path(before).name}."


def _folder(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(args.output_dir or "") / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"


def _name(process: int) -> str:
    return f"segment_memory_{process}.pt"


# Checks whether a tensor file is complete, from its header and its length; no tensor is read.


SAFETENSORS = ".safetensors"
# zip archives, as torch.save writes them
ZIPS = (".bin", ".pt", ".pth")


def why_not_whole(file: Path) -> str | None:
    """Return what is wrong with a file of safetensors or `torch.save`, as the end of a sentence; None if complete."""
    try:
        if not file.is_file():
            return "is missing" if not file.exists() else "is not a file"
        if file.suffix != SAFETENSORS:
            return _why_not_zip(file)
        tensor_names(file)
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    except SafetensorError as error:
        return f"is truncated or damaged ({error})"
    return None


def tensor_names(file: Path) -> set[str]:
    """Return the names of the tensors in a complete safetensors file."""
    with safe_open(file, framework="pt") as tensors:
        return set(tensors.keys())


def _why_not_zip(file: Path) -> str | None:
    try:
        with zipfile.ZipFile(file) as archive:
            # the list of members is at the end of the file
            return None if archive.namelist() else "is empty"
    except (zipfile.BadZipFile, ValueError, EOFError, NotImplementedError):
        return "is truncated"
