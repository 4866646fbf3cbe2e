"""Processes that share texts, in groups under data parallelism; and what the others do when one of them is lost."""

import json
import signal
from pathlib import Path

import pytest
import torch
from forked import server
from sharded_meshes_script import WAYS, batches, build
from torchrun import run_together, start_together

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("meshes")
    run_together(TESTS / "sharded_meshes_script.py", folder, processes=4)
    return folder


@pytest.mark.parametrize("way", WAYS)
def test_groups_find_the_gradients_of_one_process(folder: Path, way: str) -> None:
    """In single precision: the mean over the groups is that of the losses of their batches."""
    model, found = build(), torch.load(folder / f"{way}.pt")
    loss = torch.stack([model(**batch, use_cache=False).loss for batch in batches()]).mean()
    loss.backward()
    expected = {"loss": loss.detach(), **{name: each.grad for name, each in model.named_parameters()}}
    assert found.keys() == expected.keys()
    for name, each in expected.items():
        assert float(each.abs().max()) > 1e-4
        torch.testing.assert_close(found[name], each, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("how", ["forward", "backward", "stopped"])
def test_a_lost_process_is_an_error_in_the_others(tmp_path: Path, how: str) -> None:
    """One that is killed is seen at once, one that hangs when the time of the process group is over."""
    (left, lost), files, _store = start_together(TESTS / "sharded_death_script.py", tmp_path, how)
    codes = server().wait([left], 200)
    # one that hangs is killed now
    codes += server().wait([lost], 0)
    assert codes == [0, -signal.SIGKILL], "\n".join(file.read_text() for file in files)
    report = json.loads((tmp_path / f"{how}.json").read_text())
    assert report["raised"].startswith("RuntimeError")
