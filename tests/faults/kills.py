"""Kill jobs at random moments, from a process that has imported everything, so that a fork begins to work at once."""

import os
import shutil
import signal
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import torch
import transformers
from hf_efficient_attn.bench.harness.report import describe_machine
from hub_server import Hub
from training.kill_while_saving import finish, in_child

from faults.jobs import Conversion, Pull, Push, Training

# later, and earlier, than the last time: about one in six has then ended before
LONGER, SHORTER = 1.02, 0.9
# how often it is said how far it came
SAID_EVERY = 10


def kill(folder: Path, hub: Hub, num_kills: int, choice: Random) -> dict[str, Any]:
    """Kill so many jobs; return how many, and of each kind how many had not ended before."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    jobs = [kind(folder / kind.__name__.lower(), hub) for kind in (Training, Conversion, Push, Pull)]
    seconds = {job.name: undisturbed(job) for job in jobs}
    killed: Counter[str] = Counter()
    for number in range(num_kills):
        job = jobs[number % len(jobs)]
        was_killed = kill_once(job, str(number), choice.random() * seconds[job.name])
        killed[job.name] += was_killed
        # the machine may have become faster or slower
        seconds[job.name] *= LONGER if was_killed else SHORTER
        if number % SAID_EVERY == SAID_EVERY - 1:
            print(f"{number + 1} of {num_kills}: {dict(killed)}", file=sys.stderr, flush=True)
    return {"kills": num_kills, "before_the_end": dict(killed), "lost": 0}


def record(seed: int) -> dict[str, Any]:
    """Return what is written down of a run beside what it found."""
    return {"seed": seed, "machine": describe_machine(torch.device("cpu"))}


def undisturbed(job: Any) -> float:
    """Let a job do its work once, which all others are compared with; return how long it takes in seconds."""
    job.prepare("undisturbed")
    start = time.monotonic()
    finish(in_child(job.act, "undisturbed"))
    seconds = time.monotonic() - start
    job.expected = job.outcome("undisturbed")
    return seconds


def kill_once(job: Any, run: str, seconds: float) -> bool:
    """Kill a job after so many seconds, check what it left, and do it again; return whether it had not ended before."""
    job.prepare(run)
    process = in_child(job.act, run)
    time.sleep(seconds)
    os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    job.check(run)
    finish(in_child(job.act, run))
    assert job.outcome(run) == job.expected, f"{job.name} {run}, killed after {seconds:.3f} s, ended otherwise"
    for left in job.folder.glob(f"*{run}*"):
        shutil.rmtree(left, ignore_errors=True)
    return os.WIFSIGNALED(status)
