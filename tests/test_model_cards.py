"""Code in the README and the model cards runs, and the files they link exist."""

import json
import re
import sys
from functools import partial
from pathlib import Path

import pytest
from distributed import run_script

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


def test_figures_are_those_of_the_committed_results() -> None:
    done = run_script([sys.executable, ROOT / "model_cards" / "figures.py", "--check"])
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("change", ["data", "picture", "unknown"])
def test_a_picture_that_differs_from_its_data_is_noticed(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One picture is renewed, found unchanged, and then parts from its data, or is joined by one that nothing draws."""
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(ROOT / "model_cards")
    import figures
    import picture_digest
    import pictures_of_cards

    losses = {step: {"step": step, "eval_loss": 10.0 / step} for step in (1, 2)}
    tried = {"learning_rate": 0.001, "history": list(losses.values())}
    found = {"blocks": {"pre_ln": {"tried": [tried]}}}
    draw = partial(pictures_of_cards.figures_of_training.learning_figure, found)
    monkeypatch.setattr(pictures_of_cards, "PICTURES", {"losses": draw})
    monkeypatch.setattr(figures, "CARDS", tmp_path)
    (tmp_path / "pictures").mkdir()
    file = tmp_path / "pictures" / "losses.png"
    assert figures.renew_pictures(only_check=True)
    assert figures.renew_pictures(only_check=False)
    assert picture_digest.saved_digest(file) == picture_digest.digest(draw())
    assert not figures.renew_pictures(only_check=True)
    if change == "data":
        losses[2]["eval_loss"] = 5.001
    elif change == "picture":
        figure = draw()
        figure.axes[0].lines[0].set_color("red")
        picture_digest.save(figure, file, pixels_per_inch=50)
    else:
        file.rename(file.with_name("other.png"))
        figures.renew_pictures(only_check=False)
    capsys.readouterr()
    assert figures.renew_pictures(only_check=True)
    expected = "other.png is drawn by nothing" if change == "unknown" else "losses.png differs from its data"
    assert expected in capsys.readouterr().out


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 160


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("adaptive_span", "adaptive_span_causal"),
        ("adaptive_span", "adaptive_span_encoder"),
        ("efficient_reformer", "efficient_reformer_causal"),
        ("efficient_reformer", "efficient_reformer_encoder"),
        ("routing_transformer", "routing_transformer_causal"),
        ("routing_transformer", "routing_transformer_encoder"),
        ("etc_transformer", "etc_transformer"),
        ("star_transformer", "star_transformer"),
        ("bp_transformer", "bp_transformer_causal"),
        ("bp_transformer", "bp_transformer_encoder"),
        ("bp_transformer", "bp_seq2seq"),
    ],
)
def test_counts_of_tests_of_transformers_are_those_that_were_run(name: str, family: str) -> None:
    families = json.loads((ROOT / "model_cards" / "hf_suite.json").read_text())["families"]
    text = " ".join((ROOT / "model_cards" / f"{name}.md").read_text().split())
    found = families[family]
    assert f"Of the {found['tests']} tests" in text
    assert f"{found['run']} run, and pass; {found['skipped']} are skipped" in text
    assert not found["failed"] + found["failed_as_expected"]
    theirs = families["reformer (transformers)"]
    counts = f"{theirs['run']} run, of which {theirs['failed_as_expected']} fail, as is expected there; "
    assert (f"{counts}{theirs['skipped']} are skipped" in text) == (name == "efficient_reformer")


def test_files_that_contributing_names_exist() -> None:
    names = re.findall(r"`([\w/]+(?:/|\.(?:py|json|sh)))`", (ROOT / "CONTRIBUTING.md").read_text())
    assert len(names) > 40
    folders = (ROOT, ROOT / "tests", ROOT / hf_efficient_attn.__name__)
    # a bare name of a file stands after one that says its folder
    folders += (folders[-1] / "models", folders[-1] / "backends", folders[-1] / "backends" / "blocked")
    assert not [name for name in names if not any((folder / name).exists() for folder in folders)]
