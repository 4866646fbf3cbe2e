"""Kill trainings while they save, resume each from its last complete checkpoint, and compare all losses.

PYTHONPATH=tests python tests/training/kill_while_saving.py --kills 400 --seed 7

Prints, as JSON, how many kills there were, how many folders with the highest number were incomplete, and how many runs
lost nothing; ends with an error at the first that did.
"""

import argparse
import json
import os
import random
import signal
import tempfile
import time
import traceback
from pathlib import Path

import torch
import transformers
from training.span_runs import SEGMENT, build_model, build_trainer, text
from transformers.trainer_utils import get_last_checkpoint

import hf_efficient_attn as hea

STEPS = 5
# of one save, roughly; kills come at random moments of it, and a little later
SECONDS = 0.12
LOSSES = "losses.json"


class Losses(transformers.TrainerCallback):
    """Write the loss of every step to a file that no kill can spoil, as it is read back only at the end."""

    def on_train_end(self, args, state, control, **kwargs):
        losses = {entry["step"]: entry["loss"] for entry in state.log_history if "loss" in entry}
        (Path(args.output_dir) / LOSSES).write_text(json.dumps(losses))


class Saving(transformers.Trainer):
    """Say, through a pipe, when the save begins that is to be interrupted."""

    pipe, which = -1, 0

    def _save_checkpoint(self, *args, **kwargs):
        if self.state.global_step == self.which:
            os.write(self.pipe, b"x")
        return super()._save_checkpoint(*args, **kwargs)


def train(folder: Path, checkpoint: str | None, pipe: int = -1, which: int = 0) -> None:
    """Train to the end, saving after every step."""
    model = build_model(0, vocab_size=4000, hidden_size=64)
    optimizer = torch.optim.Adagrad(hea.optimizer_groups(model, 0.0), lr=0.07)
    segments = hea.TextSegments(text(2 * (STEPS * SEGMENT + 1)), 2, SEGMENT)
    saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": STEPS, "logging_steps": 1}
    trainer = build_trainer(folder, model, segments, optimizer, [hea.SpanCallback(), Losses()], **saving)
    trainer.__class__ = Saving
    trainer.pipe, trainer.which = pipe, which
    trainer.train(resume_from_checkpoint=checkpoint)


def in_child(action, *args, **kwargs) -> int:
    """Run a function in a forked process, which needs no imports, and return its number."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        action(*args, **kwargs)
        code = 0
    # a forked process ends here, whatever has happened: nothing above it may go on
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def finish(process: int) -> None:
    """Wait for a process that must succeed."""
    assert os.waitpid(process, 0)[1] == 0, "a training failed"


def losses_after(folder: Path, step: int) -> dict[str, float]:
    """Return the losses of the steps behind one."""
    return {name: loss for name, loss in json.loads((folder / LOSSES).read_text()).items() if int(name) > step}


def kill_once(folder: Path, reference: Path, choice: random.Random) -> bool:
    """Return whether the folder of the highest number was incomplete after a kill at a random moment of a save."""
    reader, writer = os.pipe()
    process = in_child(train, folder, None, pipe=writer, which=choice.randint(1, STEPS - 1))
    os.close(writer)
    os.read(reader, 1)
    os.close(reader)
    time.sleep(choice.random() * SECONDS)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    complete = hea.last_complete_checkpoint(folder)
    step = 0 if complete is None else int(complete.rsplit("-", 1)[1])
    newest = get_last_checkpoint(folder)
    finish(in_child(train, folder, complete))
    assert losses_after(folder, step) == losses_after(reference, step), f"{folder}: other losses after step {step}"
    return newest is not None and newest != complete


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    choice = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name:
        reference = Path(name) / "reference"
        finish(in_child(train, reference, None))
        incomplete = [kill_once(Path(name) / str(number), reference, choice) for number in range(options.kills)]
    print(json.dumps({"kills": options.kills, "newest_incomplete": sum(incomplete), "equal": options.kills}))


if __name__ == "__main__":
    main()
