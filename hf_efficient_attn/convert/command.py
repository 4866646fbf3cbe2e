"""Convert a checkpoint of transformers into our families, back, or into a longer one.

hf-efficient-attn convert FOLDER NEW_FOLDER
hf-efficient-attn convert bert-base-uncased NEW_FOLDER --max-position-embeddings 8192 --attention-window 256
hf-efficient-attn convert FOLDER NEW_FOLDER --to longformer
hf-efficient-attn convert roberta-base NEW_FOLDER --to etc_transformer
hf-efficient-attn convert roberta-base NEW_FOLDER --to compressed_transformer --mechanism linformer
"""

import argparse
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from transformers import PreTrainedModel
from transformers.utils import logging

from hf_efficient_attn.convert.configs import DEFAULT_POSITIONS, DEFAULT_WINDOW, our_config
from hf_efficient_attn.convert.conversion import convert
from hf_efficient_attn.convert.registry import COUNTERPARTS, FAMILIES, LIFTS, head_of_class, lifted_families


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    ours, both_ways = ", ".join(FAMILIES), sorted(name for name, each in COUNTERPARTS.items() if each.to_theirs)
    lifted = [
        f"{family} ({', '.join(sorted(name for name, to in LIFTS if to == family))})" for family in lifted_families()
    ]
    parser.add_argument(
        "src",
        help=f"folder, or name on the Hub, of a model of transformers ({', '.join(sorted(COUNTERPARTS))}) or of our "
        f"families ({ours})",
    )
    parser.add_argument("dst", help="folder to write, new or empty unless --overwrite is given")
    parser.add_argument(
        "--to",
        metavar="TYPE",
        help=f"what to make: {ours} (default: the one that fits), {', '.join(lifted)}, or of transformers "
        f"{', '.join(both_ways)}",
    )
    parser.add_argument(
        "--head",
        metavar="AutoModelForX",
        help="Auto class to load the source with (default: that of its config, or else of its weights)",
    )
    _add_sizes(parser)
    parser.add_argument(
        "--pattern",
        metavar="EXPRESSION",
        help='what layers read instead of a window, such as "band(256, 256) | global(0)"',
    )
    parser.add_argument(
        "--global-projections",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="global tokens read by projections of their own (default: where the source or the target has them)",
    )
    parser.add_argument(
        "--mechanism",
        metavar="NAME",
        help="what layers of a compressed_transformer compute that a dense model becomes (default: nystrom)",
    )
    parser.add_argument(
        "--parity",
        action="store_true",
        help="compute what transformers does where it differs from the paper; if outputs differ on random tokens, "
        "nothing is written (what is not covered: model_cards/sparse_transformer.md)",
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace weights, configs and tokenizer of the checkpoint in dst; its other files and folders stay",
    )


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    """Add the options that are numbers of tokens."""
    parser.add_argument(
        "--max-position-embeddings",
        type=int,
        metavar="N",
        help=f"longest input in tokens (default: that of the source; of a dense one at least {DEFAULT_POSITIONS:,}, "
        "but for a compressed_transformer)",
    )
    parser.add_argument(
        "--max-target-position-embeddings",
        type=int,
        metavar="N",
        help="longest target in tokens, of an encoder-decoder (default: that of the source)",
    )
    parser.add_argument(
        "--attention-window",
        type=int,
        metavar="W",
        help="tokens read around a token, both sides together, even (default: the source's own; of a dense one "
        f"{DEFAULT_WINDOW}: its inputs of at most W / 2 + 1 tokens give what they gave; of an etc_transformer 168)",
    )


def main(args: argparse.Namespace) -> None:
    """Convert, and say what became of it; notes go to stderr, and say what warnings of transformers would."""
    options = {name: value for name, value in vars(args).items() if name not in ("src", "dst", "command", "main")}
    with _notes_on_stderr(), _quiet_transformers(), _cleaning_up_when_stopped():
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
def _quiet_transformers() -> Iterator[None]:
    """Let transformers say nothing but errors: which weights are missing or left over is told in our words."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


@contextmanager
def _cleaning_up_when_stopped() -> Iterator[None]:
    """Let SIGTERM and SIGINT end the command by SystemExit: no temporary folder is left behind, no traceback shown."""

    def stop(number: int, frame: FrameType | None) -> None:
        # a second one would interrupt the cleaning
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        # as shells report a process that a signal has ended
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _positions(model: PreTrainedModel) -> int:
    """Return the positions that tokens can have; their config may count further rows of the table."""
    counterpart = COUNTERPARTS.get(model.config.model_type)
    if counterpart is None:
        return int(model.config.max_position_embeddings)
    head = head_of_class(type(model).__name__) or "Model"
    return int(our_config(counterpart, model.config, head, parity=True).max_position_embeddings)
