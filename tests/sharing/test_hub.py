"""A model shared on the Hub or in a folder is, in another process, the same model to the last bit.

Over real HTTP against the Hub of `hub_server.py`. The sender, the receiver and a user who forgets to import the package
are processes of their own (`hub_client.py`); each runs once, for all tests.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed import run_fresh
from hub_server import Hub, running_hub
from huggingface_hub import ModelCard

CLIENT = Path(__file__).parent / "hub_client.py"
# dtype, block and matrix_init by repository
PUSHED = {"tester/fp32": ("float32", "sas_p", "identity"), "tester/bf16": ("bfloat16", "sas", "orthogonal")}
TRAINED = "tester/trained"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    with running_hub(tmp_path_factory.mktemp("hub")) as running:
        yield running


@pytest.fixture(scope="module")
def heads_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("heads"))


@pytest.fixture(scope="module")
def sent(hub: Hub, heads_folder: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the sender has, by repository or folder."""
    commands = {repo: ("push", repo, *what) for repo, what in PUSHED.items()}
    commands[TRAINED] = ("train_and_push", TRAINED, str(tmp_path_factory.mktemp("run")))
    commands[heads_folder] = ("save_heads", heads_folder)
    return run_client(hub, commands)


@pytest.fixture(scope="module")
def received(hub: Hub, heads_folder: str, sent: dict[str, Any]) -> dict[str, Any]:
    """What the receiver gets, by repository or folder."""
    commands = {repo: ("fetch", repo) for repo in (*PUSHED, TRAINED)}
    commands[heads_folder] = ("load_heads", heads_folder)
    return run_client(hub, commands)


def run_client(hub: Hub, commands: dict[str, tuple[str, ...]]) -> dict[str, Any]:
    """Run commands of hub_client.py in one fresh process; return their answers under the same keys."""
    process = [sys.executable, CLIENT, json.dumps(list(commands.values()))]
    done = run_fresh(process, env=hub.environment())
    assert done.returncode == 0, done.stderr
    return dict(zip(commands, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("repo", PUSHED)
def test_pushed_model_comes_back_bit_equal(repo: str, sent: dict[str, Any], received: dict[str, Any]) -> None:
    """push_to_hub, then AutoModel, AutoTokenizer and pipeline() elsewhere: same logits, tokens, text and defaults."""
    here, there = sent[repo], received[repo]
    assert {name: there[name] for name in here} == here
    assert there["class"] == "SimplifiedTransformerForCausalLM"
    assert there["pipeline"] == here["text"]
    assert there["dtype"] == f"torch.{PUSHED[repo][0]}"
    assert there["max_new_tokens"] == there["new_tokens"] == 7, "the generation config travelled and was used"


@pytest.mark.parametrize("repo", PUSHED)
def test_only_safetensors_are_pushed(repo: str, hub: Hub, sent: dict[str, Any]) -> None:
    """The repository holds model, tokenizer, configs and card, and no pickle."""
    names = {path.name for path in hub.files(repo).iterdir()}
    assert names >= {"config.json", "generation_config.json", "model.safetensors"}
    assert names >= {"tokenizer.json", "tokenizer_config.json", "README.md", "modeling_hf_efficient_attn.py"}
    assert not [name for name in names if name.endswith((".bin", ".pt", ".pkl"))]


def test_without_the_import_transformers_asks_for_trust(hub: Hub, sent: dict[str, Any]) -> None:
    """Whoever forgets `import hf_efficient_attn` is asked, and gets no wrong model; `test_stub_processes.py` trusts."""
    [answer] = run_client(hub, {"": ("fetch_without_package", "tester/fp32")}).values()
    assert not answer["package_imported"]
    assert "pass the argument `trust_remote_code=True`" in answer["error"]


def test_trainer_pushes_model_and_card(hub: Hub, sent: dict[str, Any], received: dict[str, Any]) -> None:
    """Trainer.push_to_hub shares a model that loads by name, with a generated card that carries the family's tags."""
    assert received[TRAINED]["digest"] == sent[TRAINED]["digest"]
    card = ModelCard.load(hub.files(TRAINED) / "README.md")
    assert {"efficient-attention", "simplified-transformer", "generated_from_trainer"} <= set(card.data.tags)
    binaries = {path.name for path in hub.files(TRAINED).iterdir() if path.suffix in (".bin", ".safetensors")}
    assert binaries == {"model.safetensors", "training_args.bin"}, "the second is Trainer's own record, not weights"


def test_bidirectional_heads_come_back_bit_equal(
    heads_folder: str, sent: dict[str, Any], received: dict[str, Any]
) -> None:
    """Every head, saved to a folder and loaded by its Auto class elsewhere, also with the fixed matrices as buffers."""
    digests = sent[heads_folder]
    assert len(set(digests.values())) == len(digests) == 10, "five heads with two kinds of W_init, all different"
    assert received[heads_folder] == digests
