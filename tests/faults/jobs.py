"""What is killed. Of each job, a run has a name; done again after a kill, it must end as one that nobody has killed."""

import hashlib
import json
import shutil
import urllib.request
from pathlib import Path
from typing import Any

import torch
from attention_models import PATTERN, build
from hub_server import Hub
from in_tree_models import in_tree
from models_cases import TINY
from training.kill_while_saving import LOSSES, STEPS, train
from transformers import AutoModel

import hf_efficient_attn as hea

# what a user has put into the folder of a checkpoint
MINE = {"notes.txt": "mine", "checkpoint-500/model.safetensors": "mine", ".git/HEAD": "main"}

# the same for all runs, since cards name it
REPO = "tester/pushed"


class Job:
    """Work in `folder`, run by run: `prepare`, `act` in a process that is killed, `check`, `act` again, `outcome`."""

    def __init__(self, folder: Path, hub: Hub) -> None:
        self.folder, self.hub, self.name = folder, hub, folder.name
        self.expected: Any = None
        folder.mkdir(parents=True)

    def prepare(self, run: str) -> None:
        """Make what exists before."""

    def check(self, run: str) -> None:
        """Check, after a kill, that nothing is lost that existed before."""


class Training(Job):
    """Five steps, each saved; it goes on from the last complete checkpoint."""

    def act(self, run: str) -> None:
        train(self.folder / run, hea.last_complete_checkpoint(self.folder / run))

    def outcome(self, run: str) -> Any:
        losses = json.loads((self.folder / run / LOSSES).read_text())
        return losses, digest(self.folder / run / f"checkpoint-{STEPS}" / "model.safetensors")


class Conversion(Job):
    """A BERT made sparse takes the place of another checkpoint, in a folder that holds files of its user's, too."""

    def __init__(self, folder: Path, hub: Hub) -> None:
        super().__init__(folder, hub)
        in_tree("bert").save_pretrained(folder / "source")
        in_tree("roberta", num_hidden_layers=3).save_pretrained(folder / "before", max_shard_size="20kB")
        for name, text in MINE.items():
            (folder / "before" / name).parent.mkdir(exist_ok=True)
            (folder / "before" / name).write_text(text)
        self.before = contents(folder / "before")

    def prepare(self, run: str) -> None:
        shutil.copytree(self.folder / "before", self.folder / run)

    def act(self, run: str) -> None:
        hea.convert(self.folder / "source", self.folder / run, overwrite=True)

    def check(self, run: str) -> None:
        now = contents(self.folder / run)
        assert {name: now.get(name) for name in MINE} == {name: self.before[name] for name in MINE}
        # what can be loaded is one checkpoint, not parts of two
        assert "config.json" not in now or now in (self.before, self.expected), f"{run}: {sorted(now)}"
        if "config.json" not in now:
            moved = [contents(place / "old") for place in self.folder.glob(f".{run}.????????")]
            lost = [name for name, old in self.before.items() if old not in [each.get(name) for each in [now, *moved]]]
            assert not lost, f"{run}: {lost}"

    def outcome(self, run: str) -> Any:
        return contents(self.folder / run)


class Push(Job):
    """A sparsified Llama takes the place of another model on the Hub."""

    def __init__(self, folder: Path, hub: Hub) -> None:
        super().__init__(folder, hub)
        hea.AdaptiveSpanModel(hea.AdaptiveSpanConfig.modern(**TINY)).save_pretrained(folder / "before")
        self.before: Any = None

    def prepare(self, run: str) -> None:
        shutil.rmtree(self.hub.files(REPO), ignore_errors=True)
        shutil.copytree(self.folder / "before", self.hub.files(REPO))
        self.before = shown_commit(self.hub, REPO)

    def act(self, run: str) -> None:
        hea.sparsify(build("llama"), PATTERN).push_to_hub(REPO, max_shard_size="20kB")

    def check(self, run: str) -> None:
        shown = shown_commit(self.hub, REPO)
        files = sorted(contents(self.hub.files(REPO)))
        assert shown in (self.before, self.expected), f"{run}: the Hub shows half a commit, {files}"

    def outcome(self, run: str) -> Any:
        return shown_commit(self.hub, REPO)


class Pull(Job):
    """A model of the Hub is loaded through a cache that an earlier pull may have left half filled."""

    def __init__(self, folder: Path, hub: Hub) -> None:
        super().__init__(folder, hub)
        torch.manual_seed(0)
        model = hea.AdaptiveSpanModel(hea.AdaptiveSpanConfig.modern(**TINY))
        model.save_pretrained(hub.files("tester/pulled"), max_shard_size="8kB")
        self.sent = contents(hub.files("tester/pulled"))

    def act(self, run: str) -> None:
        (self.folder / run).mkdir(exist_ok=True)
        model = AutoModel.from_pretrained("tester/pulled", cache_dir=self.folder / run)
        (self.folder / run / "digest").write_text(weights_digest(model))

    def check(self, run: str) -> None:
        assert contents(self.hub.files("tester/pulled")) == self.sent

    def outcome(self, run: str) -> Any:
        return (self.folder / run / "digest").read_text()


def shown_commit(hub: Hub, repo: str) -> str:
    """Return what the Hub shows of a repository, as the number of its last commit."""
    with urllib.request.urlopen(f"{hub.url}/api/models/{repo}") as answer:
        return str(json.load(answer)["sha"])


def contents(folder: Path) -> dict[str, str]:
    """Return the digest of every file under a folder, by name."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): digest(path) for path in files}


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def weights_digest(model: torch.nn.Module) -> str:
    tensors = sorted(model.state_dict().items())
    return hashlib.sha256(b"".join(name.encode() + tensor.numpy().tobytes() for name, tensor in tensors)).hexdigest()
