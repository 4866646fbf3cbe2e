"""Convert a transformers checkpoint to this package or back, or turn a dense model into a sparse one for long texts.

    hf-efficient-attn convert bert-base-uncased long_bert --max-position-embeddings 8192 --attention-window 256
    hf-efficient-attn convert my_longformer new_folder
    hf-efficient-attn convert new_folder longformer_again --to longformer
    hf-efficient-attn convert roberta-base etc_roberta --to etc_transformer
    hf-efficient-attn convert roberta-base short_keys --to compressed_transformer --mechanism linformer

Converted Longformer models give the same outputs as before. The outputs of LED, BigBird, BigBird-Pegasus, Reformer and
Nyströmformer models may differ without --parity.
Dense models (BERT, RoBERTa, XLM-RoBERTa, ModernBERT, BART, Pegasus, Marian) become sparse and accept longer texts.
Their outputs stay the same only for texts of at most W / 2 + 1 tokens (W is --attention-window), so fine-tune them on
longer texts. The source is never changed. Lengths are in tokens.
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
from hf_efficient_attn.convert.tables.lifts import MECHANISMS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    ours, both_ways = ", ".join(FAMILIES), sorted(name for name, each in COUNTERPARTS.items() if each.to_theirs)
    lifted = [
        f"{family} ({', '.join(sorted(name for name, to in LIFTS if to == family))})" for family in lifted_families()
    ]
    parser.add_argument(
        "src",
        metavar="FOLDER",
        help="folder, or name on the Hub, of a transformers model "
        f"({', '.join(sorted(COUNTERPARTS))}) or of this package ({ours})",
    )
    parser.add_argument("dst", metavar="NEW", help="folder to write; it must be new or empty, except with --overwrite")
    parser.add_argument(
        "--to",
        metavar="TYPE",
        help=f"model type of the result (default: the one of {ours} that corresponds to the source). Some sources can "
        f"also become another type: {', '.join(lifted)}. A model of this package can be converted to these "
        f"transformers types: {', '.join(both_ways)}",
    )
    parser.add_argument(
        "--head",
        metavar="AutoModelForX",
        help="Auto class to load the source with (default: found in its config or by the names of its weights)",
    )
    _add_sizes(parser)
    parser.add_argument(
        "--pattern",
        metavar="EXPRESSION",
        help="pattern of all layers, instead of a window, such as 'band(256, 256) | global(0)'",
    )
    parser.add_argument(
        "--global-projections",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="give global tokens their own query, key and value projections (default: yes, if the source or the target "
        "has them)",
    )
    parser.add_argument(
        "--mechanism",
        metavar="NAME",
        help="attention mechanism of a compressed_transformer that is made from a dense model: "
        f"{', '.join(MECHANISMS)} (default nystrom)",
    )
    parser.add_argument(
        "--parity",
        action="store_true",
        help="compute what transformers computes, even if the paper differs; outputs are compared on random tokens, "
        "and nothing is written if they differ (exceptions: model_cards/sparse_transformer.md)",
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace weights, configs and tokenizer of the checkpoint in NEW; its other files and folders stay",
    )


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    """Add the options that are numbers of tokens."""
    parser.add_argument(
        "--max-position-embeddings",
        type=int,
        metavar="N",
        help=f"longest input in tokens (default: the source's; at least {DEFAULT_POSITIONS:,} for a dense source, "
        "unless it becomes a compressed_transformer)",
    )
    parser.add_argument(
        "--max-target-position-embeddings",
        type=int,
        metavar="N",
        help="longest target of an encoder-decoder in tokens (default: the source's)",
    )
    parser.add_argument(
        "--attention-window",
        type=int,
        metavar="W",
        help="total width of the window around each token, an even number of tokens (default: the "
        f"source's; {DEFAULT_WINDOW} for a dense source, whose outputs stay the same on inputs of up to W / 2 + 1 "
        "tokens; 168 for an etc_transformer)",
    )


def main(args: argparse.Namespace) -> None:
    """Convert, and print what the result is; notes go to stderr and replace the warnings of transformers."""
    options = {name: value for name, value in vars(args).items() if name not in ("src", "dst", "command", "main")}
    with writing_a_checkpoint():
        model = convert(args.src, args.dst, **options)
    print(
        f"{args.dst}: {type(model).__name__}, {model.num_parameters():,} parameters, {_positions(model):,} positions."
    )


@contextmanager
def writing_a_checkpoint() -> Iterator[None]:
    """Print warnings as notes, silence those of transformers, and leave no temporary folder when stopped."""
    with _notes_on_stderr(), _quiet_transformers(), _cleaning_up_when_stopped():
        yield


@contextmanager
def _notes_on_stderr() -> Iterator[None]:
    """Print warnings as notes on stderr, also if an error follows."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            yield
        finally:
            for warning in caught:
                print(f"note: {warning.message}", file=sys.stderr)


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Silence the warnings of transformers: our notes name the weights that are missing or left over."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


@contextmanager
def _cleaning_up_when_stopped() -> Iterator[None]:
    """Make SIGTERM and SIGINT raise SystemExit, which leaves no temporary folder and shows no traceback."""

    def stop(number: int, frame: FrameType | None) -> None:
        # a second signal would interrupt the cleanup
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        # the exit status that shells report for a process killed by this signal
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _positions(model: PreTrainedModel) -> int:
    """Return the number of positions for tokens; a config of transformers may also count unused rows of the table."""
    counterpart = COUNTERPARTS.get(model.config.model_type)
    if counterpart is None:
        return int(model.config.max_position_embeddings)
    head = head_of_class(type(model).__name__) or "Model"
    return int(our_config(counterpart, model.config, head, parity=True).max_position_embeddings)
