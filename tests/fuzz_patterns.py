"""Mutated pattern dicts, expressions and config files: each is laid over a length and computed, or refused by us.

A script, which continuous integration runs with a new seed each day:

    python tests/fuzz_patterns.py --cases 300000 --seed 1
    python tests/fuzz_patterns.py --seconds 25

A case fails if it raises anything but an error of this package, says more than 500 characters, or grows without bound:
an answer takes a fraction of a second and a few megabytes on any machine, so that 20 seconds or 4 GB say that it does.
A number has its own seed, so that one case can be run again by the line that a failure prints.
"""

import argparse
import contextlib
import ctypes
import gc
import json
import logging
import random
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from fuzz_models import CONFIGS, VALUES, mutate, read_config, run_model, with_pattern
from fuzz_mutations import EXPRESSIONS, a_pattern, draw_length, mutate_text
from transformers.utils import logging as transformers_logging

import hf_efficient_attn as hea
from hf_efficient_attn.attention.build_call import warn_of_keyless
from hf_efficient_attn.layout.operator_args import read_call_text, write_call_text
from hf_efficient_attn.patterns import Pattern, parse_pattern

MAX_SECONDS = 20.0
MAX_BYTES = 4 * 2**30
# attention of so many pairs takes a fraction of a second even if all of them are computed
MAX_COMPUTED_PAIRS = 1 << 21
MAX_HEADS = 8
# counting the pairs of longer ones is refused after some seconds only; `explain` counts by blocks
MAX_COUNTED_TOKENS = 1024
EXPLAINED_SHARE = 0.25
# of transformers, by its rotary embeddings
ROPE_INIT = "compute_default_rope_parameters"
STATUS = Path("/proc/self/status")
HIGH_WATER = Path("/proc/self/clear_refs")


def use(pattern: Pattern, num_tokens: int, draw: random.Random) -> None:
    """Ask a pattern for everything that a call of attention asks, and write it in every form."""
    assert Pattern.from_dict(json.loads(json.dumps(pattern.to_dict()))) == pattern
    assert read_call_text(write_call_text(pattern, 0, ()))[0] == pattern
    pattern.causal()
    heads = pattern.num_head_patterns
    next_second()
    drawn = pattern.resolve(num_tokens, 1, 0, heads)
    drawn.causal()
    query = draw.randrange(num_tokens)
    for each in (drawn, drawn.causal()):
        intervals = each.key_intervals(query, query, num_tokens)
        row = each.allowed(torch.tensor([[query]]), torch.arange(num_tokens)[None])[0].nonzero().flatten().tolist()
        assert row == [key for start, stop in intervals for key in range(start, stop)], (
            "allowed and key_intervals differ"
        )
        next_second()
        if num_tokens <= MAX_COUNTED_TOKENS:
            each.num_pairs(num_tokens, num_tokens)
        assert each.members()
    if heads > MAX_HEADS:
        return
    next_second()
    warn_of_keyless(pattern, heads, num_tokens, 0)
    next_second()
    if draw.random() < EXPLAINED_SHARE:
        str(hea.explain(pattern, num_tokens, num_heads=heads, head_dim=8, training=draw.random() < 0.5))
    if heads * num_tokens**2 <= MAX_COMPUTED_PAIRS:
        next_second()
        q = torch.zeros(1, heads, num_tokens, 8)
        hea.attention(q, q, q, pattern)


def a_dict(draw: random.Random, folder: Path) -> None:
    num_tokens = draw_length(draw)
    data = a_pattern(draw, num_tokens).to_dict()
    use(Pattern.from_dict(mutate(data, draw) if draw.random() < 0.9 else data), num_tokens, draw)


def an_expression(draw: random.Random, folder: Path) -> None:
    use(parse_pattern(mutate_text(draw.choice(EXPRESSIONS), draw)), draw_length(draw), draw)


def a_config_file(draw: random.Random, folder: Path) -> None:
    """Read a config.json of one of our families, or of a Llama with a pattern, which then attends."""
    config = read_config(draw, folder)
    # models take most of the time
    if config.model_type == "llama" or draw.random() < 0.3:
        run_model(config, draw)


def a_constructor(draw: random.Random, folder: Path) -> None:
    """Build one of our configs with one to three fields changed."""
    config = draw.choice(CONFIGS[1:])()
    fields = config.to_dict()
    changed = {draw.choice(list(fields)): draw.choice(VALUES)(draw) for _ in range(draw.randint(1, 3))}
    type(config)(**{name: value for name, value in (fields | changed).items() if name != "model_type"})


def a_model(draw: random.Random, folder: Path) -> None:
    """Run a model with a mutated pattern."""
    run_model(with_pattern(draw), draw)


Kind = Callable[[random.Random, Path], None]
# most cases in the time that there is
WEIGHTS: dict[Kind, int] = {a_dict: 45, an_expression: 35, a_config_file: 10, a_constructor: 6, a_model: 4}


def problem(error: Exception) -> str | None:
    """Return what is wrong with an error; None: it is a refusal, of ours, or of transformers before we are asked."""
    if isinstance(error, hea.EfficientAttentionError):
        return f"{len(str(error))} characters" if len(str(error)) > 500 else None
    # a file that says too little, or is none, is refused before a class of ours is asked; and every config is written
    # through a function of ours
    found = frames_of(error)
    frames = [frame.filename for frame in found]
    ours = [name for name in frames if "hf_efficient_attn/" in name and not name.endswith("integration/saving.py")]
    # what transformers refuses in its own fields is raised below our configs, or where it reads them
    own = ("transformers/modeling_utils.py", "modeling_rope_utils.py", "output_capturing.py")
    of_transformers = frames[-1].endswith(own) or any(frame.name == ROPE_INIT for frame in found)
    of_configs = bool(ours) and "models/config/" in ours[-1] and ours[-1] != frames[-1]
    is_ours = bool(ours) and not of_transformers and not of_configs
    return "".join(traceback.format_exception(error)[-6:]) if is_ours else None


class Run:
    """The most that answers have taken so far.

    slowest, largest: (seconds, number of the case) and (bytes, number of the case).
    """

    number = 0
    slowest = (0.0, 0)
    largest = (0, 0)


class TooLongError(BaseException):
    """The second of an answer is over; no `except Exception` takes it for one."""


@contextlib.contextmanager
def time_limit() -> Iterator[None]:
    """Raise TooLongError within, where the limit is over since `next_second`."""

    def stop(*_: object) -> None:
        raise TooLongError

    signal.signal(signal.SIGPROF, stop)
    next_second()
    try:
        yield
    finally:
        end_second(0)


def next_second() -> None:
    """Count the time of the next answer."""
    end_second(MAX_SECONDS)


def end_second(seconds: float) -> None:
    """Remember how long the answer took, and count `seconds` from now on; 0: count nothing."""
    left, _ = signal.setitimer(signal.ITIMER_PROF, seconds)
    if left > 0:
        Run.slowest = max(Run.slowest, (MAX_SECONDS - left, Run.number))


def run_case(seed: int, number: int, folder: Path) -> tuple[str, str | None]:
    """Return the kind of a case and how it ended, and what is wrong with it; None: nothing."""
    draw = random.Random(f"{seed} {number}")
    (kind,) = draw.choices(list(WEIGHTS), list(WEIGHTS.values()))
    before, ended, found, Run.number = memory(), "taken", None, number
    try:
        with time_limit():
            kind(draw, folder)
    except TooLongError as error:
        places = [f"{frame.name} ({Path(frame.filename).name}:{frame.lineno})" for frame in frames_of(error)]
        found, ended = f"longer than {MAX_SECONDS} seconds: {' > '.join(places)}", "stopped"
    except Exception as error:
        found, ended = problem(error), "refused"
    grown = memory("VmHWM") - before
    Run.largest = max(Run.largest, (grown, number))
    if found is None and grown > MAX_BYTES:
        found = f"{grown >> 20} MB, {ended}"
    return f"{kind.__name__} {ended}", None if found is None else f"{kind.__name__}: {found}"


def frames_of(error: BaseException) -> traceback.StackSummary:
    return traceback.extract_tb(error.__traceback__)


def memory(line: str = "VmRSS") -> int:
    """Return the bytes that the process has, and count its most from now on; "VmHWM": the most that it has had.

    Where the system does not say, both are the most that it ever had.
    """
    if not HIGH_WATER.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    if line == "VmRSS":
        HIGH_WATER.write_text("5")
    return 1024 * int(re.search(rf"{line}:\s+(\d+)", STATUS.read_text())[1])  # type: ignore[index]


def give_memory_back() -> None:
    """Give what was freed back to the system, so that later cases do not fill it unseen."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def main() -> None:
    """Run the cases, or one again; exit code 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--cases", type=int, default=10**9, help="at most so many")
    parser.add_argument("--first", type=int, default=0, help="number of the first")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="at most so long")
    parser.add_argument("--seed", type=int, default=int(time.strftime("%Y%m%d")), help="default: the day")
    parser.add_argument("--only", type=int, help="one case, by its number")
    parser.add_argument("--failures", type=int, default=1, help="stop after so many")
    args = parser.parse_args()
    quiet()
    print(f"seed {args.seed}", flush=True)
    stop, failures, counts = time.monotonic() + args.seconds, 0, Counter[str]()
    numbers = range(args.first, args.first + args.cases) if args.only is None else (args.only,)
    with tempfile.TemporaryDirectory() as folder:
        # what is imported and built once takes its time before the cases
        for number in range(100):
            with contextlib.suppress(Exception):
                list(WEIGHTS)[number % len(WEIGHTS)](random.Random(number), Path(folder))
        for done, number in enumerate(numbers):
            if time.monotonic() > stop or failures >= args.failures:
                break
            if done % 500 == 0:
                give_memory_back()
            if done and done % 10_000 == 0:
                print(f"{done} cases, {failures} failures, {time.process_time():.0f} s", flush=True)
            kind, found = run_case(args.seed, number, Path(folder))
            counts[kind] += 1
            if found is not None:
                failures += 1
                print(f"python tests/fuzz_patterns.py --seed {args.seed} --only {number}\n{found}\n", flush=True)
    print(", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())))
    print(f"slowest: {Run.slowest[0]:.2f} s, case {Run.slowest[1]}", end="; ")
    print(f"largest: {Run.largest[0] >> 20} MB, case {Run.largest[1]}")
    print(f"{counts.total()} cases in {time.process_time():.0f} s, {failures} failures", flush=True)
    sys.exit(1 if failures else 0)


def quiet() -> None:
    """Say nothing of what transformers notes about strange configs."""
    warnings.simplefilter("ignore")
    transformers_logging.set_verbosity(logging.CRITICAL)
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)


if __name__ == "__main__":
    main()
