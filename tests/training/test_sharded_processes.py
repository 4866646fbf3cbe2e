"""Processes that share texts, in groups under data parallelism; and what the others do when one of them is lost."""

import json
import signal
import sys
from pathlib import Path

import pytest
import torch
from distributed import run_distributed, start_distributed
from sharded_meshes_script import WAYS, batches, build

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("meshes")
    run_distributed(TESTS / "sharded_meshes_script.py", folder, world_size=4)
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
    script = [sys.executable, TESTS / "sharded_death_script.py", tmp_path, how]
    (left, lost), _store = start_distributed(script, tmp_path)
    printed, _ = left.communicate(200)
    # one that hangs is killed now
    lost.kill()
    assert (left.returncode, lost.returncode) == (0, -signal.SIGKILL), printed
    report = json.loads((tmp_path / f"{how}.json").read_text())
    assert report["raised"].startswith("RuntimeError")
