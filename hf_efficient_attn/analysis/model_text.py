"""Text files that commands are given by --text, and the tokens a model reads of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from hf_efficient_attn.convert.hub import find_on_hub
from hf_efficient_attn.errors import InputError

NUM_BYTES = 256
# of adapters, and of models
CONFIGS = ("adapter_config.json", "config.json")


def find_saved(source: str) -> str:
    """Return where transformers reads a saved model, by a single question to the Hub instead of its retries.

    Raises:
        CheckpointError: no folder, and the Hub has none of this name or cannot be asked.
    """
    return find_on_hub(source, CONFIGS)


def read_bytes(path: Path) -> bytes:
    """Return the content of a text file.

    Raises:
        InputError: there is no such file.
    """
    if not path.is_file():
        raise InputError(f"--text {path}: no such file.")
    return path.read_bytes()


def decoded(content: bytes) -> str:
    """Return the text of a file, for a tokenizer.

    Raises:
        InputError: it is not in UTF-8.
    """
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise InputError(
            f"The text is not in UTF-8: byte {error.start:,} is {content[error.start]:#04x}. Save it in UTF-8; only "
            f"models of the {NUM_BYTES} bytes read any file."
        ) from error


def tokenizer_of(source: str, vocab_size: int) -> Any:
    """Return the tokenizer beside a model; None: there is none, and the model's tokens can be bytes.

    Raises:
        InputError: there is none, and they cannot.
    """
    saved = find_saved(source)
    try:
        return AutoTokenizer.from_pretrained(saved)
    except (OSError, ValueError) as error:
        if vocab_size == NUM_BYTES:
            return None
        raise InputError(
            f"{source}: it has no tokenizer, and its {vocab_size:,} tokens cannot be the {NUM_BYTES} bytes. "
            "Save its tokenizer beside it."
        ) from error


def check_tokens(source: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raise InputError if a text has fewer than two tokens, or one that the model does not have."""
    if len(ids) < 2:
        raise InputError(f"The text has {len(ids)} tokens; attention between tokens needs at least 2.")
    if max(ids) >= vocab_size:
        raise InputError(
            f"{source}: its tokenizer gives token {max(ids)}, but the model has {vocab_size:,} tokens. Save the "
            "tokenizer the model was trained with beside it."
        )
