"""The Python standard library's own source as a corpus: on every disk, no download, the same on every run.

Files whose relative path hashes to a multiple of 20 are held out (about one in twenty), so a file stays on its side of
the split whatever else the library contains. Tests, installed packages and copies of a file are left out.
"""

import hashlib
import sysconfig
import zlib
from pathlib import Path

from shared.arguments import UsageError

EXCLUDED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
HELD_OUT_EVERY = 20


def stdlib_documents(max_train_bytes: int) -> tuple[list[str], list[str]]:
    """Return the training texts, at most `max_train_bytes` of them, and all held-out texts.

    The order is that of a hash of the path: mixed by subject, so that a cut leaves every subject in, and fixed.

    Raises:
        UsageError: no source file fits: `max_train_bytes` is too small, or this Python carries no source.
    """
    root = Path(sysconfig.get_path("stdlib"))
    train, held_out, num_train_bytes = [], [], 0
    for path_hash, text in sorted(_read_sources(root)):
        num_bytes = len(text.encode())
        if path_hash % HELD_OUT_EVERY == 0:
            held_out.append(text)
        elif num_train_bytes + num_bytes <= max_train_bytes:
            train.append(text)
            num_train_bytes += num_bytes
    if not train or not held_out:
        raise UsageError(
            f"No source file of the standard library fits in {max_train_bytes:,} bytes. Raise --max_train_bytes, or "
            "give --train_file if this Python was installed without its source."
        )
    return train, held_out


def _read_sources(root: Path) -> list[tuple[int, str]]:
    """Return (hash of the path, text) of every distinct UTF-8 source file that is not a test."""
    sources, seen = [], set()
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if EXCLUDED_FOLDERS & set(relative.parts):
            continue
        content = path.read_bytes()
        digest = hashlib.sha256(content).digest()
        if not content.strip() or digest in seen:
            continue
        seen.add(digest)
        try:
            sources.append((zlib.crc32(relative.as_posix().encode()), content.decode("utf-8")))
        except UnicodeDecodeError:
            continue  # a handful of files declare another encoding
    return sources
