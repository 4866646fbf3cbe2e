"""What a model remembers of past segments, saved beside a checkpoint in one file per process, never half of one."""

import os
import pickle
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_efficient_attn.errors import CheckpointError
from hf_efficient_attn.models.spans.memory import SegmentMemory
from hf_efficient_attn.training.complete_checkpoints import checkpoint_before, memory_files

FIELDS = set(vars(SegmentMemory()))


def file_names(args: TrainingArguments) -> list[str]:
    """Return the names of the files of all processes."""
    return [_name(process) for process in range(args.world_size)]


def write_memory(memory: SegmentMemory, args: TrainingArguments, state: TrainerState) -> None:
    """Write the file of this process beside the checkpoint of this step, if it has a folder; no half file is seen."""
    file = _folder(args, state) / _name(args.process_index)
    if not file.parent.is_dir():
        return
    partial = file.with_name(f".{file.name}.partial")
    with partial.open("wb") as stream:
        torch.save(vars(memory), stream)
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(file)


def read_memory(memory: SegmentMemory, args: TrainingArguments, state: TrainerState) -> None:
    """Fill the memory from the file of this process, if the checkpoint has one.

    The checkpoint is the one named in the arguments, or else that of this step in `output_dir`.

    Raises:
        CheckpointError: the file is damaged, or was announced and is missing.
    """
    folders = [_folder(args, state)]
    if isinstance(args.resume_from_checkpoint, str) and Path(args.resume_from_checkpoint).is_dir():
        folders.insert(0, Path(args.resume_from_checkpoint))
    files = [folder / _name(args.process_index) for folder in folders]
    file = next((each for each in files if each.is_file()), None)
    if file is not None:
        vars(memory).update(_load(file, args.device))
        return
    announced = memory_files({"stateful_callbacks": state.stateful_callbacks})
    if announced:
        raise CheckpointError(
            f"{files[0]} is missing, one of {len(announced)} files that the checkpoint was saved with: without what "
            f"its processes remembered, training cannot go on in the middle of a text. {_what_to_do(files[0])} One "
            "outside of output_dir needs args.resume_from_checkpoint, and as many processes as it had."
        )


def _load(file: Path, device: torch.device) -> dict[str, Any]:
    try:
        content = torch.load(file, map_location=device, weights_only=True)
    except (OSError, RuntimeError, ValueError, KeyError, EOFError, pickle.PickleError) as error:
        raise CheckpointError(f"{file} is damaged and cannot be read. {_what_to_do(file)}") from error
    if not isinstance(content, dict) or content.keys() != FIELDS:
        raise CheckpointError(f"{file} is not what SpanCallback writes. {_what_to_do(file)}")
    return content


def _what_to_do(file: Path) -> str:
    before = checkpoint_before(file.parent)
    if before is None:
        return "There is no complete checkpoint before it: train from the start."
    return f"Resume from the complete checkpoint before it, beside it: {Path(before).name}."


def _folder(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(args.output_dir or "") / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"


def _name(process: int) -> str:
    return f"segment_memory_{process}.pt"
