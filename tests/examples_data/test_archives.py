import shutil
import subprocess
from pathlib import Path

import pytest
from corpora.archives import read_members
from tiny_packages import write_deb, write_tgz, write_wheel

FILES = {"usr/share/a.txt": b"one", "usr/share/deep/b.txt": "zwölf".encode(), "usr/c.html": b"three"}
TEXTS = {path: content for path, content in FILES.items() if path.endswith(".txt")}


@pytest.mark.parametrize("compression", ["xz", "gz", ""])
def test_deb(tmp_path: Path, compression: str) -> None:
    file = write_deb(tmp_path / "tiny_1_all.deb", FILES, compression)
    assert dict(read_members(file, "usr/*.txt")) == TEXTS
    assert dict(read_members(file, "*")) == FILES


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="needs dpkg-deb")
@pytest.mark.parametrize("compression", ["xz", "zstd", "gzip", "none"])
def test_deb_as_dpkg_writes_it(tmp_path: Path, compression: str) -> None:
    root = tmp_path / "root"
    for path, content in FILES.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)
    (root / "DEBIAN").mkdir()
    (root / "DEBIAN" / "control").write_text(
        "Package: tiny\nVersion: 1\nArchitecture: all\nMaintainer: x\nDescription: x\n"
    )
    file = tmp_path / "tiny_1_all.deb"
    subprocess.run(["dpkg-deb", f"-Z{compression}", "-b", root, file], check=True, capture_output=True)
    assert dict(read_members(file, "*.txt")) == TEXTS


def test_zstd_without_dpkg_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_deb(tmp_path / "tiny_1_all.deb", FILES)
    file.write_bytes(file.read_bytes().replace(b"data.tar.xz ", b"data.tar.zst"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="zstd.*takes dpkg-deb"):
        list(read_members(file, "*"))


def test_tgz_and_wheel(tmp_path: Path) -> None:
    for file in (write_tgz(tmp_path / "a.tgz", FILES), write_wheel(tmp_path / "a.whl", FILES)):
        assert dict(read_members(file, "*.txt")) == TEXTS


def test_nothing_is_written_outside(tmp_path: Path) -> None:
    file = write_tgz(tmp_path / "a.tgz", {"../../escaped.txt": b"x"})
    assert dict(read_members(file, "*")) == {"../../escaped.txt": b"x"}
    assert [path.name for path in tmp_path.iterdir()] == ["a.tgz"]


def test_other_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "page.tgz"
    file.write_text("<html>Not Found</html>" * 100)
    with pytest.raises(ValueError, match=r"page\.tgz: not a \.whl, \.zip, tar or \.deb"):
        list(read_members(file, "*"))
    (tmp_path / "cut.deb").write_bytes(b"!<arch>\n")
    with pytest.raises(ValueError, match="without data.tar"):
        list(read_members(tmp_path / "cut.deb", "*"))
