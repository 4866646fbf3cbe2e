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
from hf_efficient_attn.convert.destination import is_replaced
from hf_efficient_attn.convert.move_journal import finish_interrupted
from hf_efficient_attn.convert.write import write_folder
from hf_efficient_attn.hub.stub import FILE

pytestmark = pytest.mark.filterwarnings("ignore:Left behind, as sparse")

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
    with pytest.raises(hea.ConfigurationError, match=r"replaced with overwrite \(--overwrite\)"):
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


class Interrupted:
    """`Path.rename` that raises at the calls listed, before it renames, or just after."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, interruption: Any, at: range, after: bool = False) -> None:
        self.interruption, self.at, self.after = interruption, at, after
        self.calls, rename = 0, Path.rename

        def interrupted(source: Path, target: Path) -> None:
            self.calls += 1
            is_now = self.calls in self.at
            if not is_now or self.after:
                rename(source, target)
            if is_now:
                raise self.interruption

        monkeypatch.setattr(Path, "rename", interrupted)


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit, OSError])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(("exists", "steps"), [(False, 1), (True, 7)])
def test_interrupted_at_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interruption: Any, after: bool, exists: bool, steps: int
) -> None:
    dst = tmp_path / "dst"
    if exists:
        shards = {f"model-0000{shard}-of-00002.safetensors": "old" for shard in (1, 2)}
        fill(dst, {**shards, "config.json": "old", "extra.txt": "old", ".git/HEAD": "main"})
    before = contents(tmp_path)
    new = {"config.json": "new", "model.safetensors": "new", "extra.txt": "new"}
    for step in range(1, steps + 1):
        with monkeypatch.context() as patch:
            Interrupted(patch, interruption, range(step, step + 1), after)
            with pytest.raises(hea.CheckpointError if interruption is OSError else interruption):
                write_folder(dst, lambda folder: fill(folder, new))
        assert contents(tmp_path) == before
        assert {path.name for path in tmp_path.iterdir()} == ({"dst"} if exists else set())
    undisturbed = Interrupted(monkeypatch, interruption, range(0))
    write_folder(dst, lambda folder: fill(folder, new))
    assert undisturbed.calls == steps
    kept = {".git/HEAD": "main"} if exists else {}
    assert contents(dst) == {name: text.encode() for name, text in {**new, **kept}.items()}


def test_an_interruption_while_weights_are_written(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        fill(folder, {"model.safetensors": "half"})
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_folder(tmp_path / "deep" / "dst", write)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("interruption", "seen", "message"),
    [
        (KeyboardInterrupt, KeyboardInterrupt, None),
        (OSError, hea.CheckpointError, "nor put back: .* is in .*old; move"),
    ],
)
def test_what_does_not_come_back_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interruption: Any, seen: Any, message: str | None
) -> None:
    """A second interruption, while files move back: the old ones are still there, in the temporary folder."""
    dst = fill(tmp_path / "dst", {"config.json": "old", "model.safetensors": "old"})
    Interrupted(monkeypatch, interruption, range(3, 9))
    with pytest.raises(seen, match=message):
        write_folder(dst, lambda folder: fill(folder, {"config.json": "new"}))
    [left] = tmp_path.glob(".dst.*")
    assert contents(left / "old") == {"config.json": b"old", "model.safetensors": b"old"}


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
    assert f"killed, or are still running: {tmp_path / left[0]}. Delete them" in capsys.readouterr().err
    cli.main(["convert", str(bert), str(dst), "--overwrite"])
    assert f"killed, or are still running: {tmp_path / left[0]}. Delete them" in capsys.readouterr().err
    assert (tmp_path / left[0]).exists()


def test_handlers_of_signals_and_the_verbosity_come_back(bert: Path, tmp_path: Path) -> None:
    def state() -> list[Any]:
        return [signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT), logging.get_verbosity()]

    before = state()
    cli.main(["convert", str(bert), str(tmp_path / "new")])
    assert state() == before


def killed_at(folder: Path, moves: int) -> bool:
    """Replace a checkpoint in a process that ends without cleaning up before a move; return whether it came so far."""
    process = os.fork()
    if process == 0:
        rename, count = Path.rename, iter(range(100))

        def rename_or_die(self: Path, target: Any) -> Any:
            if next(count) == moves:
                os._exit(3)
            return rename(self, target)

        Path.rename = rename_or_die
        try:
            write_folder(folder, lambda new: fill(new, NEW))
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 3


OLD = {"config.json": "old", "model.safetensors": "old", "pytorch_model.bin": "old", "vocab.txt": "old", "mine": "mine"}
NEW = {"config.json": "new", "model.safetensors": "new", "tokenizer.json": "new"}


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_kill_between_moves_is_finished_by_the_next_conversion(tmp_path: Path) -> None:
    for moves in range(100):
        folder = fill(tmp_path / str(moves), OLD)
        if not killed_at(folder, moves):
            break
        [note] = finish_interrupted(folder)
        assert "was killed while its files moved. It has been finished" in note
        assert contents(folder) == {name: text.encode() for name, text in {**NEW, "mine": "mine"}.items()}
        assert not list(tmp_path.glob(f".{moves}.*"))
        assert finish_interrupted(folder) == []
    assert moves == 7


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_it_is_said_and_then_overwritten(bert: Path, tmp_path: Path) -> None:
    folder = fill(tmp_path / "old", OLD)
    assert killed_at(folder, 2)
    with pytest.warns(UserWarning, match="It has been finished"), pytest.raises(hea.ConfigurationError, match="exists"):
        hea.convert(bert, folder)
    with pytest.warns(UserWarning, match="Kept in .*: mine"):
        hea.convert(bert, folder, overwrite=True)
    assert not (folder / "vocab.txt").exists()


def test_what_cannot_be_finished_says_where_the_files_are(bert: Path, tmp_path: Path) -> None:
    fill(tmp_path / ".old.12345678", {"moves.json": "{", "old/config.json": "{}"})
    fill(tmp_path / "old", {"mine": ""})
    with pytest.raises(hea.CheckpointError, match=r"Old files are in .*\.old\.12345678/old") as error:
        hea.convert(bert, tmp_path / "old", overwrite=True)
    assert len(str(error.value)) <= 500
