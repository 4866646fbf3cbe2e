"""`hf-efficient-attn compare`, run as its users run it, at a tiny size."""

import json
from pathlib import Path
from typing import Any

import pytest
from distributed import run_script

from hf_efficient_attn.bench import memory, text_blocks
from hf_efficient_attn.cli import main

TINY = (
    "--max-length 32 --keys 8 --batch-size 2 --hidden-size 16 --layers 2 --heads 2 --vocab-size 300 --eval-tokens 256"
)
# what a causal model learns at once: the next byte follows from the one before
TEXT = "".join(f"{number} and {number + 1} make {2 * number + 1}.\n" for number in range(300))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "my.txt"
    file.write_text(TEXT)
    return file


def run(file: Path, folder: Path, *words: Any) -> dict[str, Any]:
    """Run the command and return its JSON."""
    main(["compare", str(file), *TINY.split(), "--device", "cpu", "--output", str(folder), *map(str, words)])
    return json.loads((folder / "compare.json").read_text())


def test_mechanisms_are_trained_and_compared(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A mechanism without a causal form is named, and a picture is drawn."""
    options = ["--causal", "--no-memory", "--max-steps", 3, "--mechanisms", "band", "linformer", "dense"]
    found = run(text, tmp_path / "out", *options)
    printed, said = capsys.readouterr()
    rows = {row["mechanism"]: row for row in found["results"]}
    # all are compared with dense, wherever it was named
    assert list(rows) == ["dense", "band"]
    assert found["settings"]["reference"] == "dense"
    assert "difference" not in rows["dense"]
    assert rows["band"]["difference"] == pytest.approx(rows["band"]["loss"] - rows["dense"]["loss"], abs=1e-5)
    assert rows["band"]["standard_error"] > 0
    for row in rows.values():
        assert (row["steps"], row["positions"]) == (3, "rope")
        assert row["parameters"] == rows["dense"]["parameters"]
        assert 0 < row["bits_per_byte"] < 8.5
    assert list(found["not_compared"]) == ["linformer"]
    # said before the first training, too
    assert "linformer" in said
    table = (tmp_path / "out" / "compare.md").read_text()
    assert table in printed + "\n"
    assert all(
        words in table for words in ("minus dense", "than dense", "- linformer: ", "One seed", "One learning rate")
    )
    assert (tmp_path / "out" / "compare.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_the_best_learning_rate_is_kept(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Over the seeds, by another part of the held-out text; the same call gives the same losses."""
    options = "--causal --max-steps 12 --mechanisms dense --learning-rates 1e-6 1e-2 --seeds 0 1 --no-memory --json"
    found = run(text, tmp_path / "first", *options.split())
    assert json.loads(capsys.readouterr().out) == found
    (row,) = found["results"]
    assert row["learning_rate"] == 1e-2
    assert row["tried"]["0.01"] < row["tried"]["1e-06"]
    assert row["loss_deviation"] > 0
    assert list(row["history"]) == ["0", "1"]
    (again,) = run(text, tmp_path / "second", *options.split())["results"]
    assert again["loss"] == pytest.approx(row["loss"], rel=1e-6)


def test_equal_time(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A masked language model is trained until its seconds are over, with positions where the mechanism has them."""
    # as with HF_HUB_DISABLE_PROGRESS_BARS=1
    monkeypatch.setattr("transformers.utils.logging._tqdm_active", False)
    options = "--max-seconds 0.2 --mechanisms linformer etc --no-memory --learning-rates 1e-3"
    found = run(text, tmp_path / "out", *options.split())
    for row in found["results"]:
        assert row["train_seconds"] >= 0.2
        assert row["history"]["0"][-1][:2] == [row["train_seconds"], row["steps"]]
    assert [row["positions"] for row in found["results"]] == ["learned", "its own"]
    assert any("linformer (learned), etc (its own)" in note for note in found["notes"])


def test_a_loss_that_is_not_finite_ends_a_training(text: Path, tmp_path: Path) -> None:
    options = [
        "--causal",
        "--max-steps",
        "6",
        "--mechanisms",
        "band",
        "--no-memory",
        "--learning-rates",
        "1e-3",
        "1e30",
    ]
    (row,) = run(text, tmp_path / "out", *options)["results"]
    assert list(row["tried"]) == ["0.001"]
    assert row["learning_rate"] == 1e-3


def test_memory_and_the_table_without_matplotlib(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hf_efficient_attn.bench.report.can_draw", lambda: False)
    # a fork: thorough, test_contest.py measures in a process of its own
    monkeypatch.setattr(memory.subprocess, "run", run_script)
    (row,) = run(text, tmp_path / "out", "--max-steps", 1, "--mechanisms", "dense")["results"]
    assert row["peak_memory_bytes"] > 0
    assert "pip install matplotlib" in capsys.readouterr().out
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["compare.json", "compare.md"]


@pytest.mark.parametrize(
    ("words", "field"),
    [
        ("--mechanisms dense bnad", "bnad"),
        ("--mechanisms linformer star --causal", "causal"),
        ("--keys 32", "--max-length"),
        ("--keys 2", "--keys"),
        ("--max-length 4096", "--max-length"),
        ("--batch-size 0", "batch_size"),
        ("--max-steps 0", "max_steps"),
        ("--max-seconds 0", "--max-seconds"),
        ("--learning-rates 1e-3 nan", "--learning-rates"),
        ("--seeds -1", "--seeds"),
        ("--heads 3", "num_attention_heads"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    words: str, field: str, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refusal:
        run(text, tmp_path / "out", *words.split())
    assert refusal.value.code == 2
    assert field in capsys.readouterr().err
    assert not (tmp_path / "out" / "compare.json").exists()


def test_a_tokenizer_without_a_mask_token_trains_causal_models_only(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text_blocks.train_tokenizer([TEXT], 300, 32).save_pretrained(tmp_path / "tokenizer")
    options = f"--tokenizer {tmp_path / 'tokenizer'} --mechanisms dense --max-steps 1 --no-memory".split()
    with pytest.raises(SystemExit):
        run(text, tmp_path / "out", *options)
    assert "mask token" in capsys.readouterr().err
    (row,) = run(text, tmp_path / "out", *options, "--causal")["results"]
    assert row["steps"] == 1


def test_every_file_is_held_out_at_its_end(tmp_path: Path) -> None:
    files = [tmp_path / "lower.txt", tmp_path / "upper.txt"]
    for file, text in zip(files, (TEXT, TEXT.upper()), strict=True):
        file.write_text(text)
    blocks = text_blocks.read_blocks(files, 16, 2, 6, 300)
    assert (len(blocks.validation), len(blocks.test)) == (3, 3)
    first, *_, last = blocks.tokenizer.batch_decode([*blocks.validation, *blocks.test])
    assert ("make" in first, "MAKE" in last) == (True, True)
    spelled = sum(len(text[round(0.9 * len(text)) :]) for text in (TEXT, TEXT.upper()))
    num_tokens = sum(len(blocks.tokenizer(text[round(0.9 * len(text)) :]).input_ids) for text in (TEXT, TEXT.upper()))
    assert blocks.bytes_per_token == pytest.approx(spelled / num_tokens)
