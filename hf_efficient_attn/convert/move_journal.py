"""Which files were to move when a process was killed: written before the first moves, and read by the next conversion.

A name that is not in the folder of old files has not left; one that is in the folder of new files has not arrived. So
what is missing is known at every moment, also of a second kill, and moving on leads to the new checkpoint.
"""

import glob
import json
import os
import shutil
from pathlib import Path
from typing import Any

from hf_efficient_attn.convert.destination import config_last, nearest_existing, temporary_prefix
from hf_efficient_attn.errors import CheckpointError

FILE = "moves.json"


def begin(place: Path, leaving: list[str], arriving: list[str]) -> None:
    """Write into the temporary folder which files leave for its `old`, and which of its `new` take their place."""
    partial = place / f"{FILE}.partial"
    partial.write_text(json.dumps({"leaving": leaving, "arriving": arriving}), encoding="utf-8")
    os.replace(partial, place / FILE)


def forget(place: Path) -> None:
    """Leave what did not come back to its owner, who was told of it: nothing is to be finished."""
    (place / FILE).unlink(missing_ok=True)


def finish_interrupted(dst: str | os.PathLike[str] | None) -> list[str]:
    """Finish conversions into a folder that were killed while files moved; return a note on each.

    Raises:
        CheckpointError: files cannot be moved; the message says where they are.
    """
    if dst is None:
        return []
    path = Path(dst).resolve()
    found = nearest_existing(path.parent).glob(f"{glob.escape(temporary_prefix(path))}????????/{FILE}")
    return [_finish(file.parent, path) for file in sorted(found)]


def _finish(place: Path, path: Path) -> str:
    new, old = place / "new", place / "old"
    try:
        names: dict[str, Any] = json.loads((place / FILE).read_text(encoding="utf-8"))
        old.mkdir(exist_ok=True)
        for name in names["leaving"]:
            if not (old / name).exists() and (path / name).exists():
                (path / name).rename(old / name)
        # with the config at the end, without which nothing is loaded
        for name in config_last(names["arriving"]):
            if (new / name).exists():
                (new / name).rename(path / name)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"A conversion into {path} was killed while its files moved, and cannot be finished: {error}. Old files "
            f"are in {old}, new ones in {new}; move those that you want to {path}, and delete {place}."
        ) from error
    shutil.rmtree(place, ignore_errors=True)
    return (
        f"An earlier conversion into {path} was killed while its files moved. It has been finished: the folder has "
        "what that conversion made, and no longer what it replaced."
    )
