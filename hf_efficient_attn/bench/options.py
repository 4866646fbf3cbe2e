"""Options of the benchmarks, of `hf-efficient-attn bench` and of the scripts in model_cards/benchmarks."""

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from hf_efficient_attn.bench.report import DEVICES, check_at_least_one
from hf_efficient_attn.errors import InputError

DTYPES = ("float32", "bfloat16", "float16")
# transformers compiles one function for all masks, lengths and models that share their code; torch would give up soon
RECOMPILE_LIMIT = 512


def add_counts(parser: argparse.ArgumentParser, counts: Mapping[str, tuple[int, str]]) -> None:
    """Add an option for each of `counts`, {name: (default, what it counts)}."""
    for name, (default, text) in counts.items():
        parser.add_argument(flag(name), type=int, default=default, metavar="N", help=f"{text} (default {default})")


def flag(name: str) -> str:
    """Return the option that sets `name`."""
    return f"--{name.replace('_', '-')}"


def leave_open(parser: argparse.ArgumentParser, *names: str) -> None:
    """Set the defaults of options to None, so that `fill_options` can fill in those that are not given."""
    parser.set_defaults(usual={name: parser.get_default(name) for name in names}, **dict.fromkeys(names))


def fill_options(args: argparse.Namespace, quick: Mapping[str, object]) -> None:
    """Fill in the defaults of options that `leave_open` left open; with `--quick`, the defaults in `quick`."""
    for name, usual in args.usual.items():
        if getattr(args, name) is None:
            setattr(args, name, quick.get(name, usual) if args.quick else usual)


def add_results(parser: argparse.ArgumentParser, folder: str) -> None:
    """Add `--output`, where results go, and `--json`."""
    text = "folder to write the results to (default %(default)s)"
    parser.add_argument("--output", type=Path, default=Path(folder), metavar="FOLDER", help=text)
    parser.add_argument("--json", action="store_true", help="print the results as JSON instead of tables")


def make_folder(args: argparse.Namespace) -> None:
    """Make the folder of the results before anything is measured, so that errors come early.

    Raises:
        OSError: the path is a file, or the folder cannot be made.
    """
    args.output.mkdir(parents=True, exist_ok=True)


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add `--device`."""
    text = "device to measure on; auto, the default, is cuda if there is a GPU, else cpu"
    parser.add_argument("--device", choices=DEVICES, default="auto", help=text)


def add_dtype(parser: argparse.ArgumentParser, of_what: str) -> None:
    """Add `--dtype`; see `dtype_of`."""
    parser.add_argument("--dtype", choices=DTYPES, help=f"dtype of {of_what} (default float32, on a GPU bfloat16)")


def add_threads(parser: argparse.ArgumentParser) -> None:
    """Add `--threads`; see `set_threads`."""
    text = "number of CPU threads of torch (default: torch's own choice)"
    parser.add_argument("--threads", type=int, metavar="N", help=text)


def add_max_seconds(parser: argparse.ArgumentParser, default: float) -> None:
    """Add `--max-seconds`, the time of the rounds of each length."""
    text = f"seconds of timed rounds for each length; at least two rounds are timed (default {default:g})"
    parser.add_argument("--max-seconds", type=float, default=default, metavar="S", help=text)


def add_attention_dropout(parser: argparse.ArgumentParser) -> None:
    """Add `--attention-dropout`, for the benchmarks of whole models; see `check_attention_dropout`."""
    parser.add_argument(
        "--attention-dropout",
        type=float,
        default=0.0,
        metavar="P",
        help="dropout probability of the attention weights in all models (default 0)",
    )


def check_counts(args: argparse.Namespace, counts: Iterable[str], *lists: str) -> None:
    """Raise InputError if a count, or a number in one of the named lists, is below 1."""
    smallest = {name: min(getattr(args, name)) for name in lists if getattr(args, name)}
    check_at_least_one(**{name: getattr(args, name) for name in counts}, **smallest)


def check_attention_dropout(args: argparse.Namespace) -> None:
    """Raise InputError if the dropout is out of range."""
    if not 0.0 <= args.attention_dropout < 1.0:
        raise InputError(f"attention_dropout={args.attention_dropout} must be at least 0 and below 1.")


def set_threads(args: argparse.Namespace) -> None:
    """Set the number of threads of torch if `--threads` is given.

    Raises:
        InputError: fewer than one thread.
    """
    if args.threads is not None:
        check_at_least_one(threads=args.threads)
        torch.set_num_threads(args.threads)


def dtype_of(args: argparse.Namespace, device: torch.device) -> str:
    """Return the dtype that was chosen, or the default of the device."""
    return args.dtype or ("bfloat16" if device.type == "cuda" else "float32")
