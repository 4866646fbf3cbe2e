"""What must be installed: said in one place, checked before anything else, and named in the error."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hf_efficient_attn.requirements import REQUIREMENTS, VERSION, fits

ROOT = Path(__file__).parents[1]


def test_pyproject_says_the_same() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    listed = [f"{name}>={first}" + (f",<{new}" if new else "") for name, (first, new) in REQUIREMENTS.items()]
    found = re.search(r"^dependencies = \[(.*)\]", text, re.MULTILINE)
    assert found is not None
    assert re.findall(r'"([^"]+)"', found[1]) == listed
    assert f'version = "{VERSION}"' in text


def test_the_citation_says_the_same() -> None:
    citation = (ROOT / "CITATION.cff").read_text()
    licence = re.search(r'^license = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert licence is not None
    assert {f"version: {VERSION}", f"license: {licence[1]}"} <= set(citation.splitlines())


@pytest.mark.parametrize(
    ("version", "is_right"),
    [("5.16", True), ("5.16.0", True), ("5.23.0.dev0", True), ("5.9.1", False), ("6.0.0", False), ("dev", False)],
)
def test_versions(version: str, is_right: bool) -> None:
    assert fits(version, "5.16", "6") is is_right


@pytest.mark.parametrize(
    ("library", "version", "message"),
    [
        ("transformers", "4.57.6", "transformers >= 5.16 and < 6, but 4.57.6 is installed"),
        ("transformers", "6.0.0", "transformers >= 5.16 and < 6, but 6.0.0 is installed"),
        ("torch", "2.9.1+cu128", "torch >= 2.11, but 2.9.1+cu128 is installed"),
        ("transformers", None, "transformers >= 5.16 and < 6, but none is installed"),
    ],
)
def test_import_says_what_is_needed(library: str, version: str | None, message: str, tmp_path: Path) -> None:
    """Installed libraries that have nothing but a version, in a process that finds no others."""
    for name, installed in {"torch": "2.11.0", library: version}.items():
        if installed is not None:
            (tmp_path / f"{name}.py").write_text("")
            info = tmp_path / f"{name}-{installed}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {installed}\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-S", "-c", "import hf_efficient_attn"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: ")
    assert message in last
