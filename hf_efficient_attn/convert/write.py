"""Write a checkpoint's folder whole or not at all, whatever interrupts it."""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from hf_efficient_attn.convert import move_journal as journal
from hf_efficient_attn.convert.destination import config_last, is_replaced, nearest_existing, temporary_prefix
from hf_efficient_attn.errors import CheckpointError

Moves = list[tuple[Path, Path]]


def write_folder(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a new folder beside `path`, which then takes its place; if it fails, nothing is left.

    Where `path` exists, only the files of its checkpoint are replaced. Whatever the interruption, an exception of
    any kind or SystemExit, they are as they were. Of a killed process the temporary folder stays; if it was killed
    while files moved, `finish_interrupted` moves the rest.

    Raises:
        CheckpointError: the disk is full, the folder is not the user's to write, and the like.
    """
    try:
        _write_beside(path.resolve(), write)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} could not be written, and is as it was: {error}.") from error


def _write_beside(path: Path, write: Callable[[Path], object]) -> None:
    place = Path(tempfile.mkdtemp(dir=nearest_existing(path.parent), prefix=temporary_prefix(path)))
    # the temporary folder itself is private; what moves has the user's usual permissions
    new, old = place / "new", place / "old"
    moves: Moves = []
    try:
        new.mkdir()
        write(new)
        moves = _moves(new, path, old)
        if path.exists():
            journal.begin(place, [each.name for each, _ in moves if each.parent == path], sorted(_names(new)))
        for source, target in moves:
            target.parent.mkdir(parents=True, exist_ok=True)
            source.rename(target)
    except BaseException:
        # an exception here passes over the removal, so that what has not come back is kept
        try:
            _undo(moves, path, old)
        finally:
            journal.forget(place)
        shutil.rmtree(place, ignore_errors=True)
        raise
    shutil.rmtree(place, ignore_errors=True)


def _moves(new: Path, path: Path, old: Path) -> Moves:
    """Return what has to move where, in order: without a config.json meanwhile, so that nothing mixed can be loaded."""
    if not path.exists():
        return [(new, path)]
    written = _names(new)
    replaced = (name for name in _names(path) if name in written or is_replaced(name))
    leaving = [(path / name, old / name) for name in reversed(config_last(replaced))]
    return leaving + [(new / name, path / name) for name in config_last(written)]


def _names(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


def _undo(moves: Moves, path: Path, old: Path) -> None:
    """Move back what has moved, which is no longer where it came from."""
    try:
        for source, target in reversed(moves):
            if not os.path.lexists(source) and os.path.lexists(target):
                target.rename(source)
    except OSError as error:
        raise CheckpointError(
            f"{path} could neither be written nor put back: {error}. What is missing of it is in {old}; move it back."
        ) from error
