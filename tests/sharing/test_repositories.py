"""Every family and sparsified models, over real HTTP: two pushes, card, tags, shards, revisions, pipelines, adapters.

The process, `repository_client.py`, runs once for all.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from distributed import run_fresh
from hub_server import running_hub
from sharing.shared_models import MODELS, shared_model

import hf_efficient_attn as hea
from hf_efficient_attn.errors import UnsupportedBackendError
from hf_efficient_attn.hub.card import described_tokens
from hf_efficient_attn.hub.stub import family_classes

CLIENT = Path(__file__).parent / "repository_client.py"


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the process has found, by the names of `MODELS`."""
    with running_hub(tmp_path_factory.mktemp("hub")) as hub:
        words = [sys.executable, CLIENT, json.dumps(list(MODELS))]
        done = run_fresh(words, env=hub.environment())
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(params=MODELS)
def found(request: pytest.FixtureRequest, answers: dict[str, Any]) -> dict[str, Any]:
    answer = answers[request.param]
    assert "error" not in answer, answer["error"]
    return {"name": request.param, **answer}


def test_every_family_is_shared() -> None:
    shared = {type(shared_model(name).config) for name in MODELS}
    assert family_classes().keys() <= shared


def test_both_versions_come_back(found: dict[str, Any]) -> None:
    sent, got = found["sent"], found["got"]
    assert len(set(sent["digests"])) == 2
    assert got["digests"] == sent["digests"], "the first by the hash of its commit, the second by name"
    assert got["class"] == sent["class"]


def test_weights_are_in_shards(found: dict[str, Any]) -> None:
    files = found["got"]["files"]
    assert "model.safetensors.index.json" in files
    assert sum(name.endswith(".safetensors") for name in files) > 1


def test_card_describes_the_model(found: dict[str, Any]) -> None:
    """Its own line has loaded the model; of families `push_to_hub` has written it."""
    got = found["got"]
    assert {"efficient-attention", "hf_efficient_attn", "second"} <= set(got["tags"])
    for part in (
        f"# {found['name']}",
        f"`{got['class']}`",
        *said_of_attention(shared_model(found["name"])),
        f'from_pretrained("tester/{found["name"]}")',
    ):
        assert part in got["card"]
    assert "[More Information Needed]" not in got["card"]


def said_of_attention(model: Any) -> tuple[str, ...]:
    """Return what a card says of a model's attention: what is read, drawn, or why nothing is known of it."""
    try:
        hea.explain(model, described_tokens(model.config))
    except UnsupportedBackendError as refusal:
        return (f"Its cost is not known here: {refusal}",)
    return ("| layers |", "■")


def test_pattern_travels(found: dict[str, Any]) -> None:
    assert found["got"]["pattern"] == getattr(shared_model(found["name"]).config, "attention_pattern", None)


def test_it_answers_and_generates_as_its_config_says(found: dict[str, Any]) -> None:
    got, model = found["got"], shared_model(found["name"])
    assert got["answer"] is (None if model.config.is_encoder_decoder else True)
    if model.can_generate():
        assert got["max_new_tokens"] == 5
        assert got["generated"] == 5 + (1 if model.config.is_encoder_decoder else 3)


def test_adapter_of_it_is_loaded_by_name(found: dict[str, Any]) -> None:
    pushed, loaded = found["got"]["adapter"]
    assert loaded == pushed != found["got"]["digests"][1]
