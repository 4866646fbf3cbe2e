"""Write a model's folder whole or not at all."""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from hf_efficient_attn.errors import CheckpointError, ConfigurationError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "*.model", "*.spm")


def check_destination(dst: str | os.PathLike[str] | None, overwrite: bool) -> Path | None:
    """Return where to write, before any work is done.

    Raises:
        ConfigurationError: there is something already, and it shall not be overwritten.
    """
    if dst is None:
        return None
    path = Path(dst)
    is_taken = path.exists() and (not path.is_dir() or any(path.iterdir()))
    if is_taken and not (overwrite and path.is_dir()):
        raise ConfigurationError(f"{path} exists and is not an empty folder. Give another path, or overwrite=True.")
    return path


def write_folder(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a new folder beside `path`, which then takes its name; if it fails, nothing is left."""
    parent = next(folder for folder in path.absolute().parents if folder.exists())
    with tempfile.TemporaryDirectory(dir=parent, prefix=f".{path.name}.") as temporary:
        # the temporary folder itself is private; what moves has the user's usual permissions
        new, old = Path(temporary) / "new", Path(temporary) / "old"
        new.mkdir()
        write(new)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            path.rename(old)
        try:
            new.rename(path)
        except OSError:
            if old.exists():
                old.rename(path)
            raise
        shutil.rmtree(old, ignore_errors=True)


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
