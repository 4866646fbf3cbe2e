"""Models that are saved with their code compute, generate and learn the same where the package is not installed.

The user, `copy_client.py`, is a process of its own that runs once.
"""

import ast
import json
import os
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from distributed import run_fresh
from sharing.compared import scatter
from sharing.copy_client import ENCODERS, used
from sharing.shared_models import FAMILIES, MODELS, OFTEN, OFTEN_OR_THOROUGH, shared_model
from sharing.test_stub_processes import auto_class_of
from transformers import LlamaConfig, PreTrainedConfig

import hf_efficient_attn as hea
from hf_efficient_attn import cli
from hf_efficient_attn.hub.copies import copied_sources
from hf_efficient_attn.hub.stub import FILE
from hf_efficient_attn.patterns import Band, Pattern

CLIENT = Path(__file__).parent / "copy_client.py"


def joined() -> Any:
    """Return an encoder-decoder with a pattern for each part."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0)).eval()
    return hea.sparsify(scatter(model), {"encoder": Band(2, 2), "decoder": Band(3, 0)})


@pytest.fixture(scope="module")
def answers(thorough: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the user has got, by the names of `MODELS`."""
    place = tmp_path_factory.mktemp("copies")
    heads = {}
    for name in MODELS if thorough else OFTEN:
        model = hea.hub.include_code(shared_model(name))
        model.save_pretrained(place / name)
        heads[name] = auto_class_of(model)
    t5 = hea.hub.include_code(joined())
    # a name with characters that a name of torch's operators cannot have
    t5.save_pretrained(place / "a t5, sparse")
    words = [sys.executable, CLIENT, json.dumps(heads), "a t5, sparse"]
    environment = {**os.environ, "HF_HOME": str(place / ".client"), "OMP_NUM_THREADS": "1"}
    done = run_fresh(words, place, environment)
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout.splitlines()[-1]), "place": place}


@cache
def expected(name: str) -> dict[str, Any]:
    """Return what the sender's model computes, generates and learns."""
    return used(shared_model(name))


@pytest.mark.parametrize("name", OFTEN_OR_THOROUGH)
def test_copy_computes_generates_and_learns_the_same(name: str, answers: dict[str, Any]) -> None:
    assert not answers["was_imported"]
    module = "transformers_modules" if name in FAMILIES else "transformers"
    assert answers["without"][name] == {**expected(name), "module": module, "saved_again": expected(name)["trained"]}
    assert answers["served"][name] == expected(name)["digest"]


@pytest.mark.parametrize("name", OFTEN_OR_THOROUGH)
def test_package_that_is_imported_later_wins(name: str, answers: dict[str, Any]) -> None:
    module = "hf_efficient_attn" if name in FAMILIES else "transformers"
    assert answers["with"][name] == {**expected(name), "module": module}


@pytest.mark.parametrize("name", OFTEN_OR_THOROUGH)
def test_model_of_a_copy_goes_on_under_the_package(name: str, answers: dict[str, Any]) -> None:
    """Whether it has run before the package was imported, or not."""
    assert answers["ran"][name] == [answers["without"][name]["digest"]] * 2


@pytest.mark.parametrize("name", OFTEN_OR_THOROUGH)
def test_model_of_a_copy_is_saved_with_it_again(name: str, answers: dict[str, Any]) -> None:
    first, again = (code_and_map(answers["place"] / each) for each in (name, f"again/{name}"))
    assert first == again


@torch.no_grad()
def test_encoder_of_a_copy_is_loaded_alone(answers: dict[str, Any]) -> None:
    states = joined().get_encoder()(torch.arange(2, 18)[None]).last_hidden_state
    assert answers["encoders"].keys() == set(ENCODERS)
    for found in answers["encoders"].values():
        torch.testing.assert_close(torch.tensor(found), states)


def test_command_adds_the_code_to_a_folder(tmp_path: Path) -> None:
    shared_model("sparse_transformer").save_pretrained(tmp_path / "exported")
    hea.hub.include_code(shared_model("sparse_transformer")).save_pretrained(tmp_path / "included")
    cli.main(["export-code", str(tmp_path / "exported")])
    assert "trust_remote_code=True" in (tmp_path / "exported" / "README.md").read_text()
    (tmp_path / "exported" / "README.md").unlink()
    assert contents(tmp_path / "exported") == contents(tmp_path / "included")
    assert FILE not in contents(tmp_path / "exported")


def code_and_map(folder: Path) -> dict[str, Any]:
    """Return the sources in a folder, and the Auto classes for which its config names one of them."""
    auto_map = PreTrainedConfig.get_config_dict(folder)[0]["auto_map"]
    assert all((folder / f"{entry.partition('.')[0]}.py").is_file() for entry in auto_map.values())
    return {**{path.name: path.read_text() for path in folder.glob("*.py")}, "auto classes": auto_map.keys()}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".safetensors"}


def test_what_needs_no_code_and_no_folder_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    dense = hea.sparsify(shared_model("llama"), None)
    with pytest.raises(hea.ConfigurationError, match="not LlamaForCausalLM"):
        hea.hub.include_code(dense)
    with pytest.raises(SystemExit):
        cli.main(["export-code", str(tmp_path / "nothing")])
    assert "has no config.json" in capsys.readouterr().err

    @dataclass(frozen=True)
    class Own(Band, kind="own"):
        """A pattern whose code is not in this package."""

    sparse = hea.sparsify(shared_model("llama"), Own(2, 0) | Band(1, 0))
    with pytest.raises(hea.ConfigurationError, match="'own'"):
        hea.hub.include_code(sparse)
    with pytest.raises(hea.ConfigurationError, match="'own'"):
        hea.hub.include_code(LlamaConfig(attention_pattern="own(2, 0)"))
    later = hea.hub.include_code(hea.sparsify(shared_model("llama"), Band(2, 0)))
    hea.sparsify(later, Own(2, 0))
    with pytest.raises(hea.ConfigurationError, match="'own'"):
        later.save_pretrained(tmp_path / "later")
    # as in a command, which has not imported the class
    del Pattern.kinds["own"]
    with pytest.raises(hea.ConfigurationError, match="'own'"):
        hea.hub.include_code(sparse.config)


def names_in(tree: ast.Module) -> set[str]:
    """Return the names that a file defines, or imports, where it begins."""
    bodies = [tree.body, *(each.body for each in tree.body if isinstance(each, ast.If))]
    nodes = [node for body in bodies for node in body]
    bound = [each.asname or each.name for node in nodes if isinstance(node, ast.ImportFrom) for each in node.names]
    stored = [each.id for node in nodes for each in ast.walk(node)
              if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)]  # fmt: skip
    return {*bound, *stored, *(node.name for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef))}


def test_whatever_copies_import_is_in_their_files() -> None:
    """Of all families, also of those that are thorough above."""
    classes = [(type(shared_model(name)), type(shared_model(name).config)) for name in FAMILIES]
    sources = copied_sources([each.__module__ for pair in classes for each in pair])
    files = {file.removesuffix(".py"): ast.parse(text) for file, text in sources.items()}
    defined = {file: names_in(tree) for file, tree in files.items()}
    for tree in files.values():
        for node in (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level):
            assert {each.name for each in node.names} <= defined[str(node.module)], ast.unparse(node)


def test_files_say_where_they_come_from_and_hold_no_absolute_import() -> None:
    files = copied_sources(["hf_efficient_attn.integration.interface"])
    assert list(files) == sorted(files)
    assert "hea_patterns_bands.py" in files
    for text in files.values():
        assert text.startswith("# Generated from hf_efficient_attn/")
        assert "licensed under Apache-2.0" in text.partition("\n")[0]
        code = [line.strip() for line in text.splitlines()]
        assert not [line for line in code if line.startswith(("from hf_efficient_attn", "import hf_eff"))]
