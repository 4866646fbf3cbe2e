"""Members of a package's file, read without unpacking it to disk and without running anything in it."""

import io
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import BinaryIO

AR_MAGIC = b"!<arch>\n"
AR_HEADER_BYTES = 60


def read_members(archive: Path, pattern: str) -> Iterator[tuple[str, bytes]]:
    """Yield (path, content) of every regular file of the archive whose path matches, in the archive's order.

    Args:
        archive: a .whl or .zip, a .tgz or other tar, or a .deb.
        pattern: a shell pattern for the path without a leading "./"; its `*` also matches "/".

    Links are left out. Nothing is written, so no path in an archive can point outside a folder.

    Raises:
        ValueError: the file is none of these, or a .deb whose compression this Python cannot read.
    """
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as members:
            for entry in members.infolist():
                if not entry.is_dir() and fnmatchcase(entry.filename, pattern):
                    yield entry.filename, members.read(entry)
        return
    with archive.open("rb") as stream:
        is_deb = stream.read(len(AR_MAGIC)) == AR_MAGIC
        if not is_deb:
            stream.seek(0)
        yield from _read_tar(_deb_data(archive, stream) if is_deb else stream, pattern, archive)


def _read_tar(stream: BinaryIO, pattern: str, archive: Path) -> Iterator[tuple[str, bytes]]:
    try:
        with tarfile.open(fileobj=stream, mode="r:*") as members:
            for entry in members:
                path = entry.name.removeprefix("./")
                if entry.isreg() and fnmatchcase(path, pattern):
                    content = members.extractfile(entry)
                    yield path, content.read() if content else b""
    except tarfile.ReadError as error:
        raise ValueError(f"{archive}: not a .whl, .zip, tar or .deb that can be read ({error}).") from error


def _deb_data(archive: Path, stream: BinaryIO) -> BinaryIO:
    """Return the tar of installed files inside a .deb: an `ar` of debian-binary, control.tar.* and data.tar.*."""
    while len(header := stream.read(AR_HEADER_BYTES)) == AR_HEADER_BYTES:
        name, num_bytes = header[:16].decode().rstrip(" /"), int(header[48:58])
        if name.startswith("data.tar"):
            content = stream.read(num_bytes)
            return io.BytesIO(_plain_tar(archive) if name.endswith(".zst") else content)
        stream.seek(num_bytes + num_bytes % 2, io.SEEK_CUR)  # members start at even offsets
    raise ValueError(f"{archive}: a .deb without data.tar.")


def _plain_tar(archive: Path) -> bytes:
    """Return the data.tar of a .deb compressed by zstd, which tarfile reads from Python 3.14 on only."""
    program = shutil.which("dpkg-deb")
    if program is None:
        raise ValueError(f"{archive}: compressed by zstd. Reading it takes dpkg-deb, which this machine lacks.")
    return subprocess.run([program, "--fsys-tarfile", archive], capture_output=True, check=True).stdout
