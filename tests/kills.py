"""Kill trainings and conversions at random moments, do each again, and compare with one that nobody has killed.

PYTHONPATH=tests python tests/kills.py --kills 400 --seed 7

Trainings save after every step and go on from their last complete checkpoint: the losses that follow and the last
weights must be the same. A conversion replaces a checkpoint in a folder with files of its user's: these stay, the old
checkpoint or the new one is whole, and the next conversion makes the same files. Prints, as JSON, how many jobs there
were, and of each kind how many were killed before they had ended; ends with an error at the first that lost something.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from in_tree_models import in_tree
from training.span_runs import SEGMENT, build_model, build_trainer, text

import hf_efficient_attn as hea

STEPS = 5
LOSSES = "losses.json"
# what a user has put into the folder of a checkpoint
MINE = {"notes.txt": "mine", "checkpoint-500/model.safetensors": "mine", ".git/HEAD": "main"}


class Losses(transformers.TrainerCallback):
    """Write the loss of every step into a file."""

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        losses = {entry["step"]: entry["loss"] for entry in state.log_history if "loss" in entry}
        (Path(args.output_dir) / LOSSES).write_text(json.dumps(losses))


def train(folder: Path, checkpoint: str | None) -> None:
    """Train to the end, saving after every step."""
    model = build_model(0, vocab_size=4000, hidden_size=64)
    optimizer = torch.optim.Adagrad(hea.optimizer_groups(model, 0.0))
    segments = hea.TextSegments(text(2 * (STEPS * SEGMENT + 1)), 2, SEGMENT)
    saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": STEPS}
    trainer = build_trainer(folder, model, segments, optimizer, [hea.SpanCallback(), Losses()], **saving)
    trainer.train(resume_from_checkpoint=checkpoint)


def contents(folder: Path) -> dict[str, str]:
    """Return the digest of every file under a folder, by name."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


class Training:
    """Five steps, each saved; it goes on from the last complete checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.expected = folder, None

    def prepare(self, run: str) -> None:
        pass

    def act(self, run: str) -> None:
        train(self.folder / run, hea.last_complete_checkpoint(self.folder / run))

    def check(self, run: str) -> None:
        pass

    def outcome(self, run: str) -> Any:
        weights = contents(self.folder / run / f"checkpoint-{STEPS}")["model.safetensors"]
        return json.loads((self.folder / run / LOSSES).read_text()), weights


class Conversion:
    """A BERT made sparse takes the place of another checkpoint, in a folder that holds files of its user's, too."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.expected = folder, None
        in_tree("bert").save_pretrained(folder / "source")
        in_tree("roberta", num_hidden_layers=3).save_pretrained(folder / "before", max_shard_size="20kB")
        for name, content in MINE.items():
            (folder / "before" / name).parent.mkdir(exist_ok=True)
            (folder / "before" / name).write_text(content)
        self.before = contents(folder / "before")

    def prepare(self, run: str) -> None:
        shutil.copytree(self.folder / "before", self.folder / run)

    def act(self, run: str) -> None:
        hea.convert(self.folder / "source", self.folder / run, overwrite=True)

    def check(self, run: str) -> None:
        now = contents(self.folder / run)
        assert {name: now.get(name) for name in MINE} == {name: self.before[name] for name in MINE}
        # what can be loaded is one checkpoint, not parts of two
        assert "config.json" not in now or now in (self.before, self.expected), f"{run}: {sorted(now)}"
        if "config.json" not in now:
            beside = [contents(place) for place in self.folder.glob(f".{run}.*")]
            kept = {digest for each in (now, *beside) for digest in each.values()}
            whole = [kept >= {*checkpoint.values()} for checkpoint in (self.before, self.expected)]
            assert any(whole), f"{run}: {sorted(now)}"

    def outcome(self, run: str) -> Any:
        return contents(self.folder / run)


def in_child(action: Callable[[str], None], run: str) -> int:
    """Run a function in a forked process, which needs no imports, and return its number."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        action(run)
        code = 0
    # a forked process ends here, whatever has happened: nothing above it may go on
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def finish(process: int) -> None:
    """Wait for a process that must succeed."""
    assert os.waitpid(process, 0)[1] == 0, "a process failed that nobody has killed"


def undisturbed(job: Any) -> float:
    """Let a job do its work once, which all others are compared with; return how long it takes in seconds."""
    job.prepare("undisturbed")
    start = time.monotonic()
    finish(in_child(job.act, "undisturbed"))
    job.expected = job.outcome("undisturbed")
    return time.monotonic() - start


def kill_once(job: Any, run: str, seconds: float) -> bool:
    """Kill a job after so many seconds, check what it left, and do it again; return whether it had not ended before."""
    job.prepare(run)
    process = in_child(job.act, run)
    time.sleep(seconds)
    os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    job.check(run)
    finish(in_child(job.act, run))
    assert job.outcome(run) == job.expected, f"{run}, killed after {seconds:.3f} s, ended otherwise"
    for left in job.folder.glob(f"*{run}*"):
        shutil.rmtree(left)
    return os.WIFSIGNALED(status)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="in all; trainings and conversions take turns")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    choice, killed = random.Random(options.seed), Counter[str]()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    # the thread that watches progress bars may hold a lock while a process is forked, which then waits for it for ever
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as name:
        jobs = [kind(Path(name) / kind.__name__.lower()) for kind in (Training, Conversion)]
        seconds = [undisturbed(job) for job in jobs]
        for number in range(options.kills):
            which = number % len(jobs)
            was_killed = kill_once(jobs[which], f"run{number}", choice.random() * seconds[which])
            killed[jobs[which].folder.name] += was_killed
            # the machine may have become faster or slower: about one in six ends before
            seconds[which] *= 1.02 if was_killed else 0.9
    print(json.dumps({"kills": options.kills, "before_the_end": killed}))


if __name__ == "__main__":
    main()
