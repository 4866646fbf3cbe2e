"""Write a model's folder whole or not at all."""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import AutoTokenizer

from hf_efficient_attn.errors import CheckpointError, ConfigurationError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "*.model", "*.spm")


def check_destination(dst: str | os.PathLike[str] | None, overwrite: bool, src: Any = None) -> Path | None:
    """Return where to write, before any work is done.

    Raises:
        ConfigurationError: no folder can be there; there is something that shall not, or must not, be replaced; it and
            the source `src` lie inside each other.
    """
    if dst is None:
        return None
    path = Path(dst)
    _check_source_apart(path, src)
    place = _nearest_existing(path)
    if not place.is_dir():
        raise ConfigurationError(f"{path} cannot be made, as {place} is a file. Give another path.")
    if Path.cwd().is_relative_to(path.resolve()):
        raise ConfigurationError(f"{path} is the working folder, or holds it, and cannot be replaced. Give another.")
    if path.exists() and any(path.iterdir()):
        _check_replaceable(path, overwrite)
    return path


def _check_replaceable(path: Path, overwrite: bool) -> None:
    if not (path / "config.json").is_file():
        raise ConfigurationError(
            f"{path} exists and is not an empty folder; without a config.json it is no checkpoint either, so that it "
            "is never replaced. Give another path."
        )
    if not overwrite:
        raise ConfigurationError(
            f"{path} exists and is not an empty folder. Give another path, or let it be replaced with overwrite "
            "(--overwrite)."
        )


def _check_source_apart(path: Path, src: Any) -> None:
    if not isinstance(src, str | os.PathLike) or not Path(src).exists():
        return  # in memory, or on the Hub
    source, target = Path(src).resolve(), path.resolve()
    if source.is_relative_to(target) or target.is_relative_to(source):
        raise ConfigurationError(
            f"The source {src} and the destination {path} are one folder, or one lies inside the other. Give a path "
            "beside the source, which is never changed."
        )


def _nearest_existing(path: Path) -> Path:
    """Return the path, or the first of its parents that exists."""
    whole = path.absolute()
    return next(place for place in (whole, *whole.parents) if place.exists())


def write_folder(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a new folder beside `path`, which then takes its name; if it fails, nothing is left.

    Raises:
        CheckpointError: the disk is full, the folder is not the user's to write, and the like.
    """
    try:
        _write_beside(path.absolute(), write)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} could not be written, and is as it was: {error}.") from error


def _write_beside(path: Path, write: Callable[[Path], None]) -> None:
    with tempfile.TemporaryDirectory(dir=_nearest_existing(path.parent), prefix=f".{path.name}.") as temporary:
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
