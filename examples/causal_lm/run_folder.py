"""The folder of a run: one run each, recognised again when it is resumed."""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

from shared.arguments import UsageError

import hf_efficient_attn as hea
from causal_lm.clm_arguments import ClmTrainingArguments, with_resume_value

TRAINING_SETTINGS = (
    "max_steps",
    "num_train_epochs",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "world_size",
    "seed",
    "data_seed",
    "weight_decay",
    "lr_scheduler_type",
    "warmup_steps",
    "max_grad_norm",
    "optim",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "bf16",
    "fp16",
)


def check_run_folder(folder: Path, settings: dict[str, Any], training: ClmTrainingArguments) -> None:
    """Write the settings of a new run into `folder`, or compare those of the run that is resumed.

    Raises:
        UsageError: the folder holds a run that is not resumed, or was started with other settings.
    """
    settings = {**settings, "training": {name: _plain(getattr(training, name)) for name in TRAINING_SETTINGS}}
    file = folder / "settings.json"
    earlier = json.loads(file.read_text()) if file.is_file() else None
    if earlier is not None and training.resume_from_checkpoint:
        settings["rates"] = {**earlier["rates"], **settings["rates"]}  # a resumed run may add blocks
        changed = [line for line in _differences(earlier, settings) if "(was None" not in line]
        if changed:
            raise UsageError(
                f"{folder} was started with other settings: {', '.join(changed)}. A resumed run keeps its settings; "
                "name another --output_dir for a new one."
            )
    elif any(folder.glob("**/trainer_state.json")):
        raise UsageError(
            f"{folder} already holds a run. Add --resume_from_checkpoint to continue it, or name another --output_dir."
        )
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(settings, indent=2) + "\n")


def _differences(earlier: dict[str, Any], now: dict[str, Any]) -> list[str]:
    changed = []
    for name in sorted(earlier.keys() | now.keys()):
        old, new = earlier.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            changed += _differences(old, new)
        elif old != new:
            changed.append(f"{name} (was {old}, now {new})")
    return changed


def _plain(value: Any) -> Any:
    return value.value if hasattr(value, "value") else value


def checkpoint_to_resume(resume_from_checkpoint: str | None, folder: Path) -> Path | None:
    """Return the checkpoint the model of `folder` continues from: the one named, if it is this model's, or the last.

    A checkpoint whose saving was cut off is passed over.
    """
    if not resume_from_checkpoint:
        return None
    if _names_checkpoint_of(resume_from_checkpoint, folder):
        return Path(resume_from_checkpoint)
    complete = hea.last_complete_checkpoint(folder)
    return None if complete is None else Path(complete)


def is_finished(resume_from_checkpoint: str | None, folder: Path) -> bool:
    """Return whether the model of `folder` is done and is not to be continued from an earlier checkpoint of it."""
    if not resume_from_checkpoint or _names_checkpoint_of(resume_from_checkpoint, folder):
        return False
    return (folder / "result.json").is_file()


def _names_checkpoint_of(resume_from_checkpoint: str, folder: Path) -> bool:
    return (
        Path(resume_from_checkpoint).resolve().parent == folder.resolve() and resume_from_checkpoint.lower() != "true"
    )


def check_resume_value(training: ClmTrainingArguments) -> None:
    """Raise UsageError unless `--resume_from_checkpoint` is absent, True or a checkpoint of this run."""
    value = training.resume_from_checkpoint
    if value is None or value.lower() == "true":
        return
    checkpoint = Path(value)
    if not (checkpoint / "trainer_state.json").is_file():
        raise UsageError(f"--resume_from_checkpoint {value}: not a complete checkpoint (no trainer_state.json in it).")
    if Path(training.output_dir).resolve() not in checkpoint.resolve().parents:
        raise UsageError(f"--resume_from_checkpoint {value}: not inside --output_dir {training.output_dir}.")


def command_line(words: list[str], num_processes: int) -> str:
    """Return the shell command that runs this script with `words` as its arguments."""
    launcher = ["python"] if num_processes == 1 else ["torchrun", "--nproc_per_node", str(num_processes)]
    return shlex.join([*launcher, *words])


def resume_words() -> list[str]:
    """Return the words of the running command, with `--resume_from_checkpoint` at the end."""
    kept, words = [], iter(with_resume_value(sys.argv))
    for word in words:
        if word == "--resume_from_checkpoint":
            next(words)
        elif not word.startswith("--resume_from_checkpoint="):
            kept.append(word)
    return [*kept, "--resume_from_checkpoint"]


def public_words() -> list[str]:
    """Return the words of the running command for a report: no output folder, no resuming, no full path."""
    kept, words = ["examples/" + Path(sys.argv[0]).name], iter(resume_words()[1:-1])
    for word in words:
        if word == "--output_dir":
            next(words)
        elif not word.startswith("--output_dir="):
            kept.append(Path(word).name if Path(word).is_absolute() else word)
    return kept
