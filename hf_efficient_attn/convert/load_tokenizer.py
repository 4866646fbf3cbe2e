"""The tokenizer of a source, for inputs as long as the converted model reads."""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from hf_efficient_attn.errors import CheckpointError

# one of these is in every folder that has a tokenizer
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "*.model", "*.spm")


def load_tokenizer(src: str | None, num_positions: int | None) -> Any:
    """Return the source's tokenizer for inputs of so many tokens (None: any number), or None if it has none.

    Raises:
        CheckpointError: it has one that cannot be read.
    """
    if src is None or not _has_tokenizer(src):
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(src)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"The tokenizer in {src} cannot be read: {error}.") from error
    if num_positions is not None:
        tokenizer.model_max_length = num_positions
    return tokenizer


def _has_tokenizer(src: str) -> bool:
    folder = Path(src)
    if not folder.is_dir():
        return True  # on the Hub
    return any(any(folder.glob(name)) for name in TOKENIZER_FILES)
