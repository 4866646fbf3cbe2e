"""A connection that is lost in the middle of a push or a pull: the next try succeeds, the Hub shows all or nothing."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hub_server import running_hub

from faults.cut_connections import handler_that_cuts
from faults.jobs import shown_commit

CLIENT = """
import json, sys
from attention_models import PATTERN, build
from faults.jobs import weights_digest
from transformers import AutoModelForCausalLM
import hf_efficient_attn as hea

answers = []
for command, repo in json.loads(sys.argv[1]):
    try:
        if command == "push":
            model = hea.sparsify(build("llama"), PATTERN)
            model.push_to_hub(repo, max_shard_size="20kB")
        else:
            model = AutoModelForCausalLM.from_pretrained(repo)
        answers.append(weights_digest(model))
    except Exception as error:
        answers.append(f"{type(error).__name__}: {error}")
print(json.dumps(answers))
"""


def run_client(hub: Any, *commands: tuple[str, str]) -> list[str]:
    words = [sys.executable, "-c", CLIENT, json.dumps(commands)]
    done = subprocess.run(words, env=hub.environment(), capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.neighbours
@pytest.mark.parametrize("lost", ["PUT", "POST"])
def test_a_push(lost: str, tmp_path: Path) -> None:
    """Half of an upload, or of the commit, changes nothing; the next push makes the whole model."""
    cuts = [lost]
    with running_hub(tmp_path, handler_that_cuts(cuts)) as hub:
        (tmp_path / "tester" / "name").mkdir(parents=True)
        (tmp_path / "tester" / "name" / "config.json").write_text("{}")
        before = shown_commit(hub, "tester/name")
        first, second, pulled = run_client(
            hub, ("push", "tester/name"), ("push", "tester/name"), ("pull", "tester/name")
        )
        assert not cuts
        # huggingface_hub tries an upload again, and a commit not: who pushes sees the error
        assert first == second or "Error" in first
        assert second == pulled
        assert shown_commit(hub, "tester/name") != before


@pytest.mark.neighbours
def test_a_pull_goes_on_where_it_was_cut(tmp_path: Path) -> None:
    cuts = ["GET"] * 2
    with running_hub(tmp_path, handler_that_cuts(cuts)) as hub:
        sent, pulled = run_client(hub, ("push", "tester/name"), ("pull", "tester/name"))
    assert not cuts
    assert pulled == sent
