"""Code in the README and the model cards runs, and the files they link exist."""

import json
import re
import sys
from pathlib import Path

import pytest
from distributed import run_distributed, run_script

import hf_efficient_attn

ROOT = Path(__file__).parent.parent
CARDS = sorted((ROOT / "model_cards").glob("*.md"))
# the scripts of recipes are run one by one
WITHOUT_CODE = ("benchmarks", "recipes", "scaling", "troubleshooting")
SECTIONS = re.split("^## (.+)\n", (ROOT / "model_cards" / "recipes.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
RECIPES = {title: text for title, text in zip(SECTIONS[1::2], SECTIONS[2::2], strict=True) if "```python" in text}
DOCUMENTS = RECIPES["Long documents"]


@pytest.mark.parametrize("page", [ROOT / "README.md", *CARDS], ids=lambda page: page.stem)
def test_code_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = blocks("python", page.read_text(encoding="utf-8"))
    assert found or page.stem in WITHOUT_CODE
    for block in found if page.stem != "recipes" else ():
        exec(compile(block, page.name, "exec"), {})


def blocks(kind: str, text: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", text, flags=re.DOTALL)


@pytest.mark.parametrize("title", RECIPES)
def test_recipes_run_and_print_what_the_page_says(title: str, tmp_path: Path) -> None:
    """Each script runs in a process of its own, in the order of the page; only numbers may differ."""
    text = RECIPES[title]
    scripts = blocks("python", text)
    if "documents.jsonl" in text and text != DOCUMENTS:
        scripts.insert(0, blocks("python", DOCUMENTS)[0])
    printed = ""
    for script in scripts:
        path = tmp_path / re.match(r"# (\w+\.py)\n", script)[1]
        path.write_text(script, encoding="utf-8")
        if f"torchrun --nproc_per_node 2 {path.name}" in text:
            printed += run_distributed(path, tmp_path)
        else:
            run = run_script([sys.executable, path], cwd=tmp_path)
            assert run.returncode == 0, run.stderr
            printed += run.stdout
    expected = [line for block in blocks("text", text) for line in block.splitlines()]
    assert expected
    assert not set(map(without_numbers, expected)) - set(map(without_numbers, printed.splitlines())), printed


def without_numbers(line: str) -> str:
    return re.sub(r"\d[\d,.]*", "0", line)


@pytest.mark.parametrize("page", [ROOT / "README.md", *CARDS], ids=lambda page: page.stem)
def test_linked_files_and_headings_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = [*re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", text), *re.findall(r"<img src=\"([^\"]+)()\"", text)]
    assert links
    for link, heading in links:
        if not link.startswith("http"):
            target = page.parent / link if link else page
            assert target.exists(), link
            assert not heading or heading in headings(target.read_text(encoding="utf-8")), f"{link}#{heading}"


def headings(text: str) -> list[str]:
    """Return the anchors of a Markdown page, as GitHub makes them."""
    titles = re.findall("^#+ (.+)$", text, flags=re.MULTILINE)
    return [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]


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
