"""Check and write the destination folder, and find temporary folders that earlier runs left next to it."""

import glob
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from textwrap import shorten
from typing import Any

from safetensors import SafetensorError

from hf_efficient_attn.convert.hub import one_line
from hf_efficient_attn.errors import CheckpointError, ConfigurationError
from hf_efficient_attn.hub.stub import FILE
from hf_efficient_attn.messages import shown

# files that are written, and hence replaced: weights under the names that transformers looks for, whole or in shards
WEIGHTS = re.compile(r"(pytorch_)?model(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?")
CONFIGS = ("config.json", "generation_config.json", FILE)
TOKENIZERS = (
    "added_tokens.json",
    "additional_chat_templates",
    "chat_template.jinja",
    "merges.txt",
    "sentencepiece.bpe.model",
    "source.spm",
    "special_tokens_map.json",
    "spiece.model",
    "target.spm",
    "target_vocab.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
# file systems allow names of 255 bytes, and temporary folders add 10
LONGEST_NAME = 255 - 10
# longest list of files in a note, in characters
LETTERS = 200


def check_destination(dst: str | os.PathLike[str] | None, overwrite: bool, src: Any = None) -> Path | None:
    """Check the destination before any work is done, and return its path.

    Raises:
        ConfigurationError: the folder cannot be made; it has content that may not be replaced; or it and the source
            `src` are the same folder, or one lies inside the other.
    """
    if dst is None:
        return None
    path = check_path(dst)
    _check_source_apart(path, src)
    place = nearest_existing(path)
    if not place.is_dir():
        raise ConfigurationError(f"{path} cannot be created, because {place} is a file. Give another path.")
    if path.exists() and any(path.iterdir()):
        _check_replaceable(path, overwrite)
    return path


def check_path(dst: str | os.PathLike[str]) -> Path:
    """Check that a folder can have this path, and a temporary folder a path next to it; return the path.

    Raises:
        ConfigurationError: not a path; a name that is too long, or that no folder can have; a loop of links; no access.
    """
    if not isinstance(dst, str | os.PathLike) or not os.fspath(dst):
        raise ConfigurationError(f"dst is {shown(dst)}; it must be the path of a folder.")
    try:
        whole = Path(dst).resolve()
        longest = max(len(os.fsencode(name)) for name in whole.parts)
        if longest > LONGEST_NAME:
            raise ConfigurationError(
                f"{shown(os.fspath(dst))} has a name of {longest} bytes. Names of folders, and of the temporary "
                f"folders next to them, can have at most {LONGEST_NAME}. Give a shorter path."
            )
        nearest_existing(whole)
    except ConfigurationError:
        raise
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigurationError(
            f"{shown(os.fspath(dst))} cannot be a folder: {one_line(error)}. Give another path."
        ) from error
    return Path(dst)


def is_replaced(name: str) -> bool:
    """Return whether a file is part of a checkpoint, so that it is removed when another checkpoint replaces it.

    >>> [is_replaced(name) for name in ("model-00001-of-00002.safetensors", "vocab.txt", "README.md", "checkpoint-500")]
    [True, True, False, False]
    """
    return name in CONFIGS or name in TOKENIZERS or WEIGHTS.fullmatch(name) is not None


def note_kept(path: Path | None) -> list[str]:
    """Return a note on the files that stay in the folder, because they are not part of a checkpoint."""
    kept = [] if path is None or not path.exists() else sorted(each.name for each in path.iterdir())
    listed = ", ".join(name for name in kept if not is_replaced(name))
    return [f"Kept in {path}, because they are not part of a checkpoint: {shorten(listed, LETTERS)}."] if listed else []


def note_leftovers(dst: str | os.PathLike[str] | None) -> list[str]:
    """Return a note on temporary folders that `write_folder` made for the same destination."""
    beside = [] if dst is None else leftovers(Path(dst).resolve())
    if not beside:
        return []
    return [
        f"Temporary folders of commands that wrote {dst} and were killed or are still running: "
        f"{', '.join(map(str, beside))}. Delete the folders of commands that were killed."
    ]


def leftovers(path: Path) -> list[Path]:
    """Return the temporary folders that `write_folder` made for a destination."""
    return sorted(nearest_existing(path.parent).glob(f"{glob.escape(temporary_prefix(path))}????????"))


def write_folder(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary folder next to `path`, and move the result to `path`; if it fails, nothing is left.

    If `path` exists, the files of its checkpoint are removed, the config first, and the new files are moved there, the
    config last, so that no mix of both can be loaded. If that is interrupted, the temporary folder keeps the rest.

    Raises:
        CheckpointError: the folder cannot be written, for example because the disk is full or access is denied.
    """
    try:
        _write_beside(path.resolve(), write)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} could not be written, and was not changed: {error}.") from error


def _write_beside(path: Path, write: Callable[[Path], object]) -> None:
    place = Path(tempfile.mkdtemp(dir=nearest_existing(path.parent), prefix=temporary_prefix(path)))
    # the temporary folder is private; the folder inside it, which is moved, has the usual permissions
    new, is_moving = place / "new", False
    try:
        new.mkdir()
        write(new)
        is_moving = path.exists()
        if is_moving:
            _replace_files(path, new)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            os.replace(new, path)
    finally:
        if not is_moving or (path / "config.json").exists():
            shutil.rmtree(place, ignore_errors=True)


def _replace_files(path: Path, new: Path) -> None:
    """Replace the files of the checkpoint in a folder with those of a new one."""
    written = {entry.name for entry in new.iterdir()}
    replaced = [entry.name for entry in path.iterdir() if entry.name in written or is_replaced(entry.name)]
    for name in reversed(config_last(replaced)):
        _remove(path / name)
    try:
        for name in config_last(written):
            os.replace(new / name, path / name)
    except OSError as error:
        raise CheckpointError(
            f"Not all new files could be moved to {path}: {error}. Move the rest there from {new}."
        ) from error


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def config_last(names: Iterable[str]) -> list[str]:
    """Return the sorted names of files, with the config last.

    >>> config_last(["config.json", "vocab.txt", "model.safetensors"])
    ['model.safetensors', 'vocab.txt', 'config.json']
    """
    return sorted(names, key=lambda name: (name == "config.json", name))


def temporary_prefix(path: Path) -> str:
    """Return the prefix of the temporary folders for a destination; eight random characters follow."""
    return f".{path.name}."


def nearest_existing(path: Path) -> Path:
    """Return the path, or the first of its parents that exists."""
    whole = path.absolute()
    return next(place for place in (whole, *whole.parents) if place.exists())


def _check_replaceable(path: Path, overwrite: bool) -> None:
    left = leftovers(path.resolve())
    if not (path / "config.json").is_file() and left:
        if overwrite:
            return
        raise ConfigurationError(
            f"{path} has no config.json, because the command that wrote it was interrupted. Move the files of "
            f"{left[-1] / 'new'} there, or run the command again with overwrite (--overwrite)."
        )
    if not (path / "config.json").is_file():
        raise ConfigurationError(
            f"{path} exists, is not an empty folder, and has no config.json, so it is not a checkpoint to replace. "
            "Give another path."
        )
    if not overwrite:
        raise ConfigurationError(
            f"{path} exists and is not an empty folder. Give another path, or replace the checkpoint in it with "
            "overwrite (--overwrite)."
        )


def _check_source_apart(path: Path, src: Any) -> None:
    if not isinstance(src, str | os.PathLike) or not Path(src).exists():
        return  # in memory, or on the Hub
    source, target = Path(src).resolve(), path.resolve()
    if source.is_relative_to(target) or target.is_relative_to(source):
        raise ConfigurationError(
            f"The source {src} and the destination {path} are the same folder, or one is inside the other. The source "
            "must not change: give a path outside it."
        )
