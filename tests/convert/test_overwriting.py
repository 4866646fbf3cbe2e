"""A checkpoint in the place of another: what is replaced, what stays, and what becomes of interruptions."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from distributed import run_script
from in_tree_models import in_tree
from transformers.utils import logging

import hf_efficient_attn as hea
from hf_efficient_attn import cli
from hf_efficient_attn.convert.destination import is_replaced, leftovers, write_folder
from hf_efficient_attn.hub.stub import FILE

pytestmark = pytest.mark.filterwarnings("ignore:Left out, because sparse")

# of a model without a tokenizer
WRITTEN = {"config.json", "model.safetensors", FILE}
SIGNALLED = """
import os, signal, sys
import hf_efficient_attn as hea
from hf_efficient_attn import cli

save = hea.SparseTransformerModel.save_pretrained
def save_and_be_killed(model, folder):
    save(model, folder)
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))
hea.SparseTransformerModel.save_pretrained = save_and_be_killed
cli.main(["convert", *sys.argv[2:], "--overwrite"])
"""


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    in_tree("bert").save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def fill(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_a_checkpoint_is_replaced_when_asked_and_all_else_stays(bert: Path, tmp_path: Path) -> None:
    old = tmp_path / "old"
    in_tree("roberta", num_hidden_layers=5).save_pretrained(old, max_shard_size="20kB")
    assert len(list(old.glob("model-*-of-*.safetensors"))) > 2
    torch.save({}, old / "pytorch_model.bin")
    fill(old, {"vocab.json": "{}", "merges.txt": "", "generation_config.json": "{}"})
    mine = {
        ".git/HEAD": "main",
        "README.md": "mine",
        "checkpoint-500/model.safetensors": "mine",
        "notes/config.json": "",
    }
    fill(old, mine)
    with pytest.raises(hea.ConfigurationError, match=r"overwrite \(--overwrite\)"):
        hea.convert(bert, old)
    with pytest.warns(UserWarning, match=r"Kept in .*old, .*: \.git, README\.md, checkpoint-500, notes\."):
        ours = hea.convert(bert, old, overwrite=True)
    assert {name for name in contents(old) if name not in mine} == WRITTEN
    assert {name: (old / name).read_text() for name in mine} == mine
    loaded = transformers.AutoModel.from_pretrained(old)
    assert all(tensor.equal(ours.state_dict()[name]) for name, tensor in loaded.state_dict().items())
    assert {path.name for path in tmp_path.iterdir()} == {"bert", "old"}


def test_what_a_tokenizer_writes_is_replaced() -> None:
    """Every file that the tokenizers of the convertible types save, as their classes list them."""
    classes = ("BertTokenizer", "RobertaTokenizer", "XLMRobertaTokenizer", "BigBirdTokenizer", "PegasusTokenizer")
    names = {name for each in classes for name in getattr(transformers, each).vocab_files_names.values()}
    assert {"vocab.txt", "merges.txt", "spiece.model"} < names
    assert all(is_replaced(name) for name in names)


def test_the_working_folder_can_be_the_destination(bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fill(tmp_path / "work", {"config.json": "{}"})
    monkeypatch.chdir(folder)
    hea.convert(bert, ".", overwrite=True)
    assert contents(folder).keys() == WRITTEN
    assert Path.cwd().samefile(folder)


def test_a_link_stays_a_link(bert: Path, tmp_path: Path) -> None:
    fill(tmp_path / "far" / "away", {"config.json": "{}"})
    (tmp_path / "link").symlink_to(tmp_path / "far" / "away")
    hea.convert(bert, tmp_path / "link", overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert transformers.AutoConfig.from_pretrained(tmp_path / "far" / "away").model_type == "sparse_transformer"


OLD = {"config.json": "old", "model.safetensors": "old", "pytorch_model.bin": "old", "vocab.txt": "old", "mine": "mine"}
NEW = {"config.json": "new", "model.safetensors": "new", "tokenizer.json": "new"}


@pytest.mark.filterwarnings("ignore:Kept in")
@pytest.mark.parametrize("interruption", [KeyboardInterrupt, OSError])
def test_interrupted_while_files_move(
    bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interruption: Any
) -> None:
    """What has not moved is in the folder that is named; nothing mixed can be loaded, and the next conversion may."""
    replace = os.replace
    for moves in range(len(NEW)):
        folder, left = fill(tmp_path / str(moves), OLD), iter([None] * moves)

        def interrupted(source: Path, target: Path, left: Any = left) -> None:
            if next(left, interruption) is interruption:
                raise interruption
            replace(source, target)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", interrupted)
            with pytest.raises(hea.CheckpointError if interruption is OSError else interruption) as error:
                write_folder(folder, lambda new: fill(new, NEW))
        [place] = leftovers(folder)
        assert interruption is not OSError or f"Move the rest there from {place / 'new'}" in str(error.value)
        assert not (folder / "config.json").exists()
        found = contents(folder) | contents(place / "new")
        assert found == {name: text.encode() for name, text in {**NEW, "mine": "mine"}.items()}
        with (
            pytest.raises(hea.ConfigurationError, match="Move the files of"),
            pytest.warns(UserWarning, match="Temporary folders"),
        ):
            hea.convert(bert, folder)
        with pytest.warns(UserWarning, match="Temporary folders"):
            hea.convert(bert, folder, overwrite=True)
        assert contents(folder).keys() == WRITTEN | {"mine"}


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGKILL"])
def test_signals(bert: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    dst = fill(tmp_path / "dst", {"config.json": "old", "model.safetensors": "old"})
    (tmp_path / "signalled.py").write_text(SIGNALLED)
    ended = run_script([sys.executable, tmp_path / "signalled.py", name, bert, dst])
    assert contents(dst) == {"config.json": b"old", "model.safetensors": b"old"}, ended.stderr
    left = [path.name for path in tmp_path.glob(".dst.*")]
    if name != "SIGKILL":
        assert (ended.returncode, left) == (128 + signal.Signals[name], [])
        assert "Traceback" not in ended.stderr
        return
    assert ended.returncode == -signal.SIGKILL
    with pytest.raises(SystemExit):
        cli.main(["convert", str(bert), str(dst)])
    assert f"still running: {tmp_path / left[0]}." in capsys.readouterr().err
    cli.main(["convert", str(bert), str(dst), "--overwrite"])
    assert f"still running: {tmp_path / left[0]}." in capsys.readouterr().err
    assert (tmp_path / left[0]).exists()


def test_handlers_of_signals_and_the_verbosity_come_back(bert: Path, tmp_path: Path) -> None:
    def state() -> list[Any]:
        return [signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT), logging.get_verbosity()]

    before = state()
    cli.main(["convert", str(bert), str(tmp_path / "new")])
    assert state() == before
