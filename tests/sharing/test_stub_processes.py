"""Programs that do not import the package load every family and sparsified models, where it is installed.

Over HTTP from the Hub of `hub_server.py`; the program, `stub_client.py`, is a process of its own that runs once.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from distributed import run_fresh
from hub_server import running_hub
from sharing.compared import output_digest
from sharing.shared_models import FAMILIES, MODELS, OFTEN, OFTEN_OR_THOROUGH, shared_model

CLIENT = Path(__file__).parent / "stub_client.py"
LANGUAGE_MODELS = ("AutoModelForCausalLM", "AutoModelForMaskedLM")


@pytest.fixture(scope="module")
def answers(thorough: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the sender has, and what the program has got, both by the names of models."""
    sent, wanted = {}, {}
    with running_hub(tmp_path_factory.mktemp("hub")) as hub:
        for name in MODELS if thorough else OFTEN:
            model = shared_model(name)
            model.save_pretrained(hub.files(f"tester/{name}"), max_shard_size="20kB")
            auto_map = {each: entry.partition(".")[2] for each, entry in model.config.auto_map.items()}
            saved_with = auto_class_of(model)
            # a family has both language models, and its configs are for one of them
            left_out = {"AutoConfig", saved_with, *(LANGUAGE_MODELS if name in FAMILIES else ())}
            heads = [saved_with, *(each for each in auto_map if each not in left_out)]
            sent[name] = {"digest": output_digest(model), "classes": {each: auto_map[each] for each in heads}}
            wanted[f"tester/{name}"] = heads
        words = [sys.executable, CLIENT, json.dumps(wanted)]
        done = run_fresh(words, env=hub.environment())
    assert done.returncode == 0, done.stderr
    return sent, json.loads(done.stdout.splitlines()[-1])


def auto_class_of(model: Any) -> str:
    head = type(model).__name__.partition("For")[2].replace("ConditionalGeneration", "Seq2SeqLM")
    return f"AutoModelFor{head}"


@pytest.mark.parametrize("name", OFTEN_OR_THOROUGH)
def test_trusted_stub_loads_the_same_model(name: str, answers: tuple[dict[str, Any], dict[str, Any]]) -> None:
    sent, got = answers[0][name], answers[1]["loaded"][f"tester/{name}"]
    assert not answers[1]["was_imported"]
    assert got["digest"] == sent["digest"]
    if name in FAMILIES:
        assert got["classes"] == sent["classes"]
    else:
        assert got["classes"].keys() == sent["classes"].keys()
        assert all(model.startswith(name.capitalize()) for model in got["classes"].values())


@pytest.mark.parametrize("name", OFTEN_OR_THOROUGH)
def test_without_trust_nothing_is_loaded(name: str, answers: tuple[dict[str, Any], dict[str, Any]]) -> None:
    outcomes = (
        "trust_remote_code=True" if name in FAMILIES else 'attn_implementation="hf_efficient_attn"` is not supported'
    )
    assert outcomes in answers[1]["untrusted"][f"tester/{name}"]


@pytest.mark.parametrize("name", OFTEN_OR_THOROUGH)
def test_where_it_is_not_installed_the_package_is_named(
    name: str, answers: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    assert "pip install hf_efficient_attn`" in answers[1]["not_installed"][f"tester/{name}"]


@pytest.mark.parametrize("name", OFTEN_OR_THOROUGH)
def test_engine_without_the_package_has_no_code_for_it(
    name: str, answers: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    """vLLM and SGLang refuse names that neither they nor transformers know."""
    assert answers[1]["known_names"][f"tester/{name}"] == []


@pytest.mark.parametrize("name", OFTEN_OR_THOROUGH)
def test_transformers_serve_loads_it(name: str, answers: tuple[dict[str, Any], dict[str, Any]]) -> None:
    expected = f"{type(shared_model(name)).__name__} {answers[0][name]['digest']}"
    assert answers[1]["served"][f"tester/{name}"] == expected


def test_nothing_else_is_registered(answers: tuple[dict[str, Any], dict[str, Any]]) -> None:
    assert answers[1]["registered"] == []
