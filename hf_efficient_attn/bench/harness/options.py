"""The options that benchmarks have in common."""

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from hf_efficient_attn.bench.harness.report import DEVICES, check_at_least_one
from hf_efficient_attn.bench.harness.timing import counts_processor_time
from hf_efficient_attn.errors import InputError

DTYPES = ("float32", "bfloat16", "float16")


def add_counts(parser: argparse.ArgumentParser, counts: Mapping[str, tuple[int, str]]) -> None:
    """Add an option for each of `counts`, {name: (default, what it counts)}."""
    for name, (default, text) in counts.items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=int, default=default, metavar="N", help=f"{text} (default {default})")


def leave_open(parser: argparse.ArgumentParser, *names: str) -> None:
    """Let options that are not given be None until `fill_options` gives them their defaults."""
    parser.set_defaults(usual={name: parser.get_default(name) for name in names}, **dict.fromkeys(names))


def fill_options(args: argparse.Namespace, quick: Mapping[str, object]) -> None:
    """Give the options that were left open and not given their defaults; with `--quick` those in `quick` differ."""
    for name, usual in args.usual.items():
        if getattr(args, name) is None:
            setattr(args, name, quick.get(name, usual) if args.quick else usual)


def refuse_given(args: argparse.Namespace, option: str, names: Iterable[str]) -> None:
    """Raise InputError for options that were left open, but given beside an option under which they do nothing."""
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(args, name) is not None]
    if given:
        raise InputError(f"{option} makes no use of {', '.join(given)}. Leave out one or the other.")


def add_results(parser: argparse.ArgumentParser, folder: str) -> None:
    """Add where results go, `--output`, and `--json`."""
    parser.add_argument("--output", type=Path, default=Path(folder), help="folder of the results (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the results as JSON instead of tables")


def make_folder(args: argparse.Namespace) -> None:
    """Make the folder of the results: one that cannot be written is refused before anything is measured.

    Raises:
        OSError: it is a file, or not the user's to make.
    """
    args.output.mkdir(parents=True, exist_ok=True)


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add `--device`."""
    parser.add_argument(
        "--device",
        choices=DEVICES,
        default="auto",
        help="where to measure; auto, the default, takes CUDA if there is a device",
    )


def add_dtype(parser: argparse.ArgumentParser, of_what: str) -> None:
    """Add `--dtype`; see `dtype_of`."""
    parser.add_argument("--dtype", choices=DTYPES, help=f"dtype of {of_what} (default float32, on CUDA bfloat16)")


def add_max_seconds(parser: argparse.ArgumentParser, default: float, unit: str = "length") -> None:
    """Add `--max-seconds`, for each of what is timed in rounds of its own."""
    text = f"seconds of timed rounds per {unit}, two at least (default {default:g})"
    parser.add_argument("--max-seconds", type=float, default=default, metavar="S", help=text)


def add_step_options(parser: argparse.ArgumentParser, of_what: str, max_seconds: float, unit: str = "length") -> None:
    """Add what the benchmarks of training steps have: `--dtype`, `--device`, `--threads` and `--max-seconds`."""
    add_dtype(parser, of_what)
    add_device(parser)
    parser.add_argument(
        "--threads", type=int, metavar="N", help="threads of torch on a CPU (default: as torch chooses)"
    )
    add_max_seconds(parser, max_seconds, unit)


def add_attention_dropout(parser: argparse.ArgumentParser) -> None:
    """Add `--attention-dropout`, for the benchmarks of whole models; see `check_attention_dropout`."""
    parser.add_argument(
        "--attention-dropout", type=float, default=0.0, metavar="P", help="attention dropout of all models (default 0)"
    )


def check_counts(args: argparse.Namespace, counts: Mapping[str, tuple[int, str]], *lists: str) -> None:
    """Raise InputError if a count, or a number of the lists with these names, is below 1."""
    check_at_least_one(
        **{name: getattr(args, name) for name in counts}, **{name: min(getattr(args, name)) for name in lists}
    )


def check_attention_dropout(args: argparse.Namespace) -> None:
    """Raise InputError if the dropout is out of range."""
    if not 0.0 <= args.attention_dropout < 1.0:
        raise InputError(f"attention_dropout={args.attention_dropout} must be at least 0 and below 1.")


def set_threads(args: argparse.Namespace) -> None:
    """Set the threads of torch, where some are given.

    Raises:
        InputError: fewer than one thread.
    """
    if args.threads is not None:
        check_at_least_one(threads=args.threads)
        torch.set_num_threads(args.threads)


def dtype_of(args: argparse.Namespace, device: torch.device) -> str:
    """Return the dtype that was chosen, or the default of the device."""
    return args.dtype or ("bfloat16" if device.type == "cuda" else "float32")


def device_settings(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Return the settings that follow from the device: the dtype, and whether the processor's time is counted."""
    return {"dtype": dtype_of(args, device), "processor_time": counts_processor_time(device)}
