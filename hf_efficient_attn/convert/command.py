"""Convert a checkpoint of transformers into our families, back, or into a longer one.

hf-efficient-attn convert FOLDER NEW_FOLDER
hf-efficient-attn convert bert-base-uncased NEW_FOLDER --max-position-embeddings 8192 --attention-window 256
hf-efficient-attn convert FOLDER NEW_FOLDER --to longformer
"""

import argparse
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from transformers import PreTrainedModel

from hf_efficient_attn.convert.configs import our_config
from hf_efficient_attn.convert.conversion import convert
from hf_efficient_attn.convert.parity import list_exceptions
from hf_efficient_attn.convert.registry import COUNTERPARTS, head_of_class


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    parser.add_argument("src", help=f"folder, or name on the Hub, of a model of type {', '.join(sorted(COUNTERPARTS))}")
    parser.add_argument("dst", help="folder to write, new or empty unless --overwrite is given")
    parser.add_argument("--to", metavar="TYPE", help="family or model type to make (default: the family that fits)")
    parser.add_argument(
        "--head",
        metavar="AutoModelForX",
        help="head to load (default: that of the config, or else of the weights)",
    )
    parser.add_argument("--max-position-embeddings", type=int, metavar="N", help="longest input in tokens")
    parser.add_argument(
        "--max-target-position-embeddings", type=int, metavar="N", help="longest target of an encoder-decoder"
    )
    parser.add_argument(
        "--attention-window",
        type=int,
        metavar="W",
        help="tokens read around a token, both sides together, even "
        "(dense sources: 512); inputs of at most W / 2 + 1 tokens give what the source gives",
    )
    parser.add_argument("--pattern", metavar="EXPRESSION", help='such as "band(256, 256) | global(0)"')
    parser.add_argument(
        "--global-projections",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="global tokens read by projections of their own",
    )
    parser.add_argument(
        "--parity",
        action="store_true",
        help="what transformers computes, where it differs from the paper; outputs are compared on random tokens, and "
        f"where they differ nothing is written. Not covered: {list_exceptions()}",
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace weights, configs and tokenizer of the checkpoint in DST; its other files and folders stay",
    )


def main(args: argparse.Namespace) -> None:
    """Convert, and say what became of it; notes go to stderr."""
    options = {name: value for name, value in vars(args).items() if name not in ("src", "dst", "command", "main")}
    with _notes_on_stderr(), _cleaning_up_when_terminated():
        model = convert(args.src, args.dst, **options)
    print(
        f"{args.dst}: {type(model).__name__}, {model.num_parameters():,} parameters, {_positions(model):,} positions."
    )


@contextmanager
def _notes_on_stderr() -> Iterator[None]:
    """Print notes, also those before an error."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            yield
        finally:
            for warning in caught:
                print(f"note: {warning.message}", file=sys.stderr)


@contextmanager
def _cleaning_up_when_terminated() -> Iterator[None]:
    """Let SIGTERM end the command by SystemExit, which leaves no temporary folder behind."""

    def stop(number: int, frame: FrameType | None) -> None:
        # a second one would interrupt the cleaning
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        # as shells report a process that a signal has ended
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _positions(model: PreTrainedModel) -> int:
    """Return the positions that tokens can have; their config may count further rows of the table."""
    counterpart = COUNTERPARTS.get(model.config.model_type)
    if counterpart is None:
        return int(model.config.max_position_embeddings)
    head = head_of_class(type(model).__name__) or "Model"
    return int(our_config(counterpart, model.config, head, parity=True).max_position_embeddings)
