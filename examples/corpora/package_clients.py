"""The ordinary package clients: how each is asked for one file, names it, and says why there is none."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote


class PackageError(Exception):
    """A package that could not be had; the message says which, why, and what to do instead."""


class PackageNotServedError(PackageError):
    """The client reached its registry, and this package, or this version of it, is not there."""


@dataclass(frozen=True)
class Client:
    """A package client on this machine.

    Args:
        words: the command that downloads one package into the working folder, without the package.
        between: what stands between a package's name and its version on the command line.
        file_name: returns a regular expression for the file of a package, with the version as its only group.
        not_served: what it prints when the registry has no such package or version.
        advice: what else to try when it has no such package.
    """

    words: tuple[str, ...]
    between: str
    file_name: Callable[[str], str]
    not_served: tuple[str, ...]
    advice: str = ""


CLIENTS = {
    "apt-get": Client(
        words=("apt-get", "-q", "download"),
        between="=",
        file_name=lambda name: rf"{re.escape(name)}_([^_]+)_[^_]+\.deb",
        not_served=("Unable to locate package", "was not found", "no installation candidate", "404  Not Found"),
        advice=" If its package lists are old or missing, run `apt-get update` first.",
    ),
    "npm": Client(
        words=("npm", "pack", "--ignore-scripts", "--fetch-retries", "1"),
        between="@",
        file_name=lambda name: rf"{re.escape(name.lstrip('@').replace('/', '-'))}-(\d.*)\.tgz",
        not_served=("E404", "ETARGET"),
    ),
    # wheels only: to look at a source distribution, pip would run its build code
    "pip": Client(
        words=(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--retries", "1"),
        between="==",
        file_name=lambda name: rf"(?i:{re.sub(r'[-_.]+', '[-_.]+', name)})-([^-]+)-.*\.whl",
        not_served=("No matching distribution found",),
    ),
}
UNREACHABLE = re.compile(
    "ENOTFOUND|ECONNREFUSED|ECONNRESET|ETIMEDOUT|EAI_AGAIN|ENETUNREACH|ENOTCACHED"  # npm
    "|Could not resolve|Could not connect|Temporary failure|Unable to connect|Connection timed out"  # apt-get
    "|NewConnectionError|ConnectTimeout|ProxyError|Failed to establish a new connection|Max retries exceeded"  # pip
)
MINUTES = 10  # more than this for one package: the client hangs


def command(client: str, name: str, version: str | None = None) -> list[str]:
    """Return the command that downloads a package into the working folder; without `version`, the newest."""
    known = CLIENTS[client]
    return [*known.words, name if version is None else f"{name}{known.between}{version}"]


def version_of(client: str, name: str, file_name: str) -> str | None:
    """Return the version in the name of a package's file, or None if the file is not of this package."""
    found = re.fullmatch(CLIENTS[client].file_name(name), unquote(file_name))
    return found[1] if found else None


def download(client: str, name: str, version: str | None, folder: Path) -> Path:
    """Run the client in the empty `folder` and return the file it leaves there. Progress goes to stderr.

    Raises:
        PackageNotServedError: no such package or version.
        PackageError: the client is missing, reaches no registry, hangs, or fails in another way.
    """
    words = command(client, name, version)
    label = f"{client} download of {name}{'' if version is None else ' ' + version}"
    program = shutil.which(words[0])
    if program is None:
        raise PackageError(f"{label}: there is no {words[0]} on this machine.")
    output, exit_code = _run([program, *words[1:]], folder, label)
    files = [file for file in folder.iterdir() if version_of(client, name, file.name) is not None]
    if exit_code == 0 and len(files) == 1:
        return files[0]
    last_words = " / ".join(line.strip() for line in output.strip().splitlines()[-4:])
    # pip says that there is no such distribution also when it reached no registry
    if UNREACHABLE.search(output):
        raise PackageError(f"{label}: no registry was reached ({last_words}).")
    if any(sign in output for sign in CLIENTS[client].not_served):
        raise PackageNotServedError(f"{label}: not served ({last_words}).{CLIENTS[client].advice}")
    left = f"exit code {exit_code}, {len(files)} files"
    raise PackageError(f"{label}: failed with {left} ({last_words or 'no output'}).")


def _run(words: list[str], folder: Path, label: str) -> tuple[str, int]:
    """Return (output, exit code) of a command, counting the seconds on a terminal meanwhile."""
    log = folder / "client.log"
    start = time.monotonic()
    with log.open("w") as output:
        environment = {**os.environ, "LC_ALL": "C"}
        process = subprocess.Popen(
            words, cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        try:
            while process.poll() is None:
                if time.monotonic() - start > MINUTES * 60:
                    raise PackageError(f"{label}: stopped after {MINUTES} minutes without an end.")
                _show(label, time.monotonic() - start)
                time.sleep(0.1)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            _show(label, time.monotonic() - start, last=True)
    return log.read_text(errors="replace"), process.returncode


def _show(label: str, seconds: float, last: bool = False) -> None:
    if sys.stderr.isatty():
        print(f"\r{label}: {seconds:.0f} s", end="\n" if last else "", file=sys.stderr, flush=True)
    elif last:
        print(f"{label}: {seconds:.1f} s", file=sys.stderr, flush=True)
