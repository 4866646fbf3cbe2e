"""Code in the README and the model cards runs, and the files they link exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import hf_efficient_attn

ROOT = Path(__file__).parent.parent
CARDS = sorted((ROOT / "model_cards").glob("*.md"))
WITHOUT_CODE = ("benchmarks", "troubleshooting")


@pytest.mark.parametrize("page", [ROOT / "README.md", *CARDS], ids=lambda page: page.stem)
def test_code_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    assert blocks or page.stem in WITHOUT_CODE
    for block in blocks:
        exec(compile(block, page.name, "exec"), {})


@pytest.mark.parametrize("page", [ROOT / "README.md", *CARDS], ids=lambda page: page.stem)
def test_linked_files_exist(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", page.read_text())
    assert links
    for link in links:
        if not link.startswith("http"):
            assert (page.parent / link).exists(), link


@pytest.mark.parametrize("page", [ROOT / "README.md", *CARDS], ids=lambda page: page.stem)
def test_no_placeholder_is_left(page: Path) -> None:
    assert "@@" not in page.read_text()
    assert "TODO" not in page.read_text()


def test_figures_are_those_of_the_committed_results() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "model_cards" / "figures.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 160


def test_files_that_contributing_names_exist() -> None:
    names = re.findall(r"`([\w/]+(?:/|\.(?:py|json|sh)))`", (ROOT / "CONTRIBUTING.md").read_text())
    assert len(names) > 40
    folders = (ROOT, ROOT / "tests", ROOT / hf_efficient_attn.__name__)
    # a bare name of a file stands after one that says its folder
    folders += (folders[-1] / "models", folders[-1] / "backends", folders[-1] / "backends" / "blocked")
    assert not [name for name in names if not any((folder / name).exists() for folder in folders)]
