"""The source of this Python's standard library."""

import sysconfig
import zlib
from contextlib import suppress
from pathlib import Path

from datasets import Dataset, DatasetDict


def python_sources() -> DatasetDict:
    """Return the source files of this Python's standard library, without tests: `path` and `text`. No download.

    A hash of the path determines the order, which mixes the subjects, and the files for validation, one in twenty.
    """
    root, paths = Path(sysconfig.get_path("stdlib")), {}
    for file in sorted(root.rglob("*.py")):
        path = file.relative_to(root)
        if not {"site-packages", "dist-packages", "test", "tests", "idle_test"} & set(path.parts):
            paths.setdefault(file.read_bytes(), path.as_posix())
    parts = {"train": [], "validation": []}
    for place, path, content in sorted((zlib.crc32(path.encode()), path, content) for content, path in paths.items()):
        with suppress(UnicodeDecodeError):  # a few files have other encodings
            if content.strip():
                parts["train" if place % 20 else "validation"].append({"path": path, "text": content.decode("utf-8")})
    if not all(parts.values()):
        raise SystemExit(f"This Python was installed without its source: too few .py files in {root}.")
    return DatasetDict({split: Dataset.from_list(rows) for split, rows in parts.items()})
