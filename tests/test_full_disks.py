"""A full disk, and a folder that must not be written to: an error, nothing is lost, and the next try succeeds."""

import os
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from in_tree_models import in_tree
from kills import LOSSES, contents, train

import hf_efficient_attn as hea
from hf_efficient_attn import cli
from hf_efficient_attn.hub.copies import copy_files
from hf_efficient_attn.hub.stub import FILE
from hf_efficient_attn.patterns import Band

pytestmark = [
    pytest.mark.filterwarnings("ignore:Left out, because sparse", "ignore:Kept in"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux"),
]
NOBODY = 65534


def error_in_child(act: Callable[[], Any], before: Callable[[], Any] = lambda: None) -> str:
    """Return the error that `act` ends with in a forked process, after `before`; "": it has ended well."""
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        message = ""
        try:
            before()
            act()
        except BaseException as error:
            message = f"{type(error).__name__}: {error}"
        finally:
            os.write(writer, message.encode())
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        message = pipe.read()
    os.waitpid(process, 0)
    return message


def limit_files(num_bytes: int) -> None:
    """Let no file become larger, with the error of a full disk's kind."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))


def be_nobody() -> None:
    """Become a user who may read what others own and write nothing of it; who runs tests may be allowed everything."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)


def test_a_conversion_onto_a_full_disk(tmp_path: Path) -> None:
    bert, old = tmp_path / "bert", tmp_path / "old"
    in_tree("bert").save_pretrained(bert)
    in_tree("roberta").save_pretrained(old)
    (old / "notes.txt").write_text("mine")
    before = contents(old)
    message = error_in_child(lambda: hea.convert(bert, old, overwrite=True), lambda: limit_files(20_000))
    assert message.startswith("CheckpointError: ")
    assert contents(old) == before
    assert {path.name for path in tmp_path.iterdir()} == {"bert", "old"}
    hea.convert(bert, old, overwrite=True)
    assert (old / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("place_mode", [0o555, 0o777])
def test_a_conversion_into_a_folder_of_others(place_mode: int) -> None:
    """Where nothing can be written beside it, and where its own files alone cannot be removed."""
    # the folders of pytest are closed to all other users
    with tempfile.TemporaryDirectory() as name:
        place, old, model = Path(name), Path(name) / "old", in_tree("bert")
        in_tree("roberta").save_pretrained(old)
        before = contents(old)
        place.chmod(place_mode)
        old.chmod(0o555)
        message = error_in_child(lambda: hea.convert(model, old, overwrite=True), be_nobody)
        for path in (place, old):
            path.chmod(0o755)
        assert message.startswith("CheckpointError: ")
        assert "Permission denied" in message
        assert contents(old) == before
        assert list(place.iterdir()) == [old]


def sparse_bert() -> Any:
    return hea.sparsify(in_tree("bert"), Band(3, 3))


def test_a_model_saved_onto_a_full_disk(tmp_path: Path) -> None:
    message = error_in_child(lambda: sparse_bert().save_pretrained(tmp_path), lambda: limit_files(100))
    assert "File too large" in message
    assert list(tmp_path.iterdir()) == []
    sparse_bert().save_pretrained(tmp_path)
    assert (tmp_path / FILE).is_file()


def test_code_exported_onto_a_full_disk(tmp_path: Path) -> None:
    """Some of its files are there, each of them whole, and the model is as it was."""
    sparse_bert().save_pretrained(tmp_path)
    largest = max(len(text.encode()) for text in copy_files(sparse_bert().config).values())
    before, export = contents(tmp_path), lambda: cli.main(["export-code", str(tmp_path)])
    message = error_in_child(export, lambda: limit_files(largest - 1))
    assert message.startswith(("OSError", "SystemExit"))
    after = contents(tmp_path)
    assert before.items() <= after.items()
    assert not [name for name in after if name.startswith(".")]
    export()
    written, whole = after.keys() - before.keys(), contents(tmp_path)
    assert written
    assert {name: after[name] for name in written} == {name: whole[name] for name in written}


def test_a_training_onto_a_full_disk_goes_on_later(tmp_path: Path) -> None:
    """What it has saved is whole, and the losses are those of a training that nothing has stopped."""
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert error_in_child(lambda: train(whole, None)) == ""
    largest = max(path.stat().st_size for path in whole.rglob("*.safetensors"))
    shutil.copytree(whole / "checkpoint-1", run / "checkpoint-1")
    message = error_in_child(lambda: train(run, str(run / "checkpoint-1")), lambda: limit_files(largest // 2))
    assert "Error" in message
    assert hea.last_complete_checkpoint(run) == str(run / "checkpoint-1")
    assert error_in_child(lambda: train(run, hea.last_complete_checkpoint(run))) == ""
    assert (run / LOSSES).read_text() == (whole / LOSSES).read_text()
