"""Code in the README and the model cards runs, and the files they link exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CARDS = sorted((ROOT / "model_cards").glob("*.md"))


@pytest.mark.parametrize("page", [ROOT / "README.md", *CARDS], ids=lambda page: page.stem)
def test_code_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    assert blocks
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
