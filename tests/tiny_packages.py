"""Small packages in their real formats."""

import gzip
import hashlib
import io
import tarfile
import zipfile
from pathlib import Path

Files = dict[str, bytes]


def write_tar(files: Files, compression: str) -> bytes:
    """Return a tar of regular files and one link, compressed by "gz", "xz" or nothing ("")."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode=f"w:{compression}") as members:
        for path, content in files.items():
            entry = tarfile.TarInfo(path)
            entry.size = len(content)
            members.addfile(entry, io.BytesIO(content))
        link = tarfile.TarInfo("link.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        members.addfile(link)
    return stream.getvalue()


def write_tgz(file: Path, files: Files) -> Path:
    file.write_bytes(write_tar(files, "gz"))
    return file


def write_wheel(file: Path, files: Files) -> Path:
    with zipfile.ZipFile(file, "w") as members:
        for path, content in files.items():
            members.writestr(path, content)
    return file


def write_deb(file: Path, files: Files, compression: str = "xz") -> Path:
    """Write an `ar` of three members: 60-byte headers, contents padded to even offsets."""
    installed = {f"./{path}": content for path, content in files.items()}
    suffix = f".{compression}" if compression else ""
    members = {
        "debian-binary": b"2.0\n",
        "control.tar.gz": write_tar({"./control": b"Package: tiny"}, "gz") + b"odd"[: len(files) % 2],
        f"data.tar{suffix}": write_tar(installed, compression),
    }
    content = b"!<arch>\n"
    for name, body in members.items():
        content += f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(body):<10}`\n".encode()
        content += body + b"\n" * (len(body) % 2)
    file.write_bytes(content)
    return file


def gzipped(text: str) -> bytes:
    return gzip.compress(text.encode(), mtime=0)


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
