"""Code in the README and the model cards runs, and the files they link exist."""

import json
import re
from pathlib import Path

import pytest

import hf_efficient_attn

ROOT = Path(__file__).parent.parent
CARDS = sorted((ROOT / "model_cards").glob("*.md"))
WITHOUT_CODE = ("benchmarks", "scaling", "troubleshooting")


@pytest.mark.parametrize("page", [ROOT / "README.md", *CARDS], ids=lambda page: page.stem)
def test_code_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    assert blocks or page.stem in WITHOUT_CODE
    for block in blocks:
        exec(compile(block, page.name, "exec"), {})


@pytest.mark.parametrize("page", [ROOT / "README.md", *CARDS], ids=lambda page: page.stem)
def test_linked_files_exist(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)|<img src=\"([^\"]+)\"", page.read_text())
    links = [in_markdown or in_html for in_markdown, in_html in links]
    assert links
    for link in links:
        if not link.startswith("http"):
            assert (page.parent / link).exists(), link


@pytest.mark.parametrize("page", [ROOT / "README.md", *CARDS], ids=lambda page: page.stem)
def test_no_placeholder_is_left(page: Path) -> None:
    assert "@@" not in page.read_text()
    assert "TODO" not in page.read_text()
    assert "Not measured yet" not in page.read_text()


def test_tables_are_those_of_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "model_cards")
    import figures

    pages = figures.pages()
    assert [page for page, text in pages.items() if page.read_text(encoding="utf-8") != text] == []
    # no result is without a table or a picture, but those that docstrings of examples quote
    used = {name for text in pages.values() for name in re.findall(r"<!-- figures: (\w+),", text)}
    files = {file.stem for file in (ROOT / "model_cards" / "results").glob("*.json")}
    assert {name for name in files - used if not name.startswith("run_")} == {
        "compare_spans_fixed_64",
        "spans_adaptive",
    }


def test_pictures_are_drawn_or_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every picture is shown on a page, and every PNG is drawn by figures.py, but for the icons of some families."""
    monkeypatch.syspath_prepend(ROOT / "model_cards")
    import figures

    folder = ROOT / "model_cards" / "pictures"
    names = {file.relative_to(folder).as_posix() for file in folder.rglob("*.*")}
    shown = " ".join(page.read_text(encoding="utf-8") for page in [ROOT / "README.md", *CARDS])
    assert [name for name in names if f"pictures/{name}" not in shown] == []
    assert {f"{name}.png" for name in figures.PICTURES} <= names
    assert {f"{name}.png" for name in figures.PICTURES} >= {name for name in names if "/" not in name}


def test_samples_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "model_cards")
    import figures

    monkeypatch.setattr(figures, "CARDS", tmp_path)
    (tmp_path / "results").mkdir()
    times = {"milliseconds": {"median": 1.23456789}, "samples": [1.0, 2.0]}
    (tmp_path / "written.json").write_text(
        json.dumps({"settings": {"heads": 2}, "results": [times, {"reason": "none"}]})
    )
    figures.keep(tmp_path / "written.json", "kept")
    kept = (tmp_path / "results" / "kept.json").read_text()
    assert kept == '{\n"settings": {"heads": 2},\n"results": [\n {"milliseconds": {"median": 1.23457}},\n {}\n]\n}\n'


def test_files_that_contributing_names_exist() -> None:
    names = re.findall(r"`([\w/]+(?:/|\.(?:py|json|sh)))`", (ROOT / "CONTRIBUTING.md").read_text())
    assert names
    folders = (ROOT, ROOT / "tests", ROOT / hf_efficient_attn.__name__)
    # a bare name of a file stands after one that says its folder
    folders += (folders[-1] / "models", folders[-1] / "backends", folders[-1] / "backends" / "blocked")
    assert not [name for name in names if not any((folder / name).exists() for folder in folders)]
