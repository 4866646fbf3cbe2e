"""What cannot be converted is refused before weights are loaded; what is lost of mixed dtypes is named."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from in_tree_models import in_tree
from safetensors.torch import load_file, save_file

import hf_efficient_attn as hea
from hf_efficient_attn.convert import configs, conversion
from hf_efficient_attn.convert.registry import COUNTERPARTS


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    in_tree("bert").save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


def change_config(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention_window": 7}, "attention_window=7"),
        ({"attention_window": 8.0}, "must be an integer, such as 512"),
        ({"attention_window": 0}, "Use 2"),
        ({"attention_window": 8, "pattern": "band(4, 4)"}, "exclude each other"),
        ({"pattern": "band(4"}, "band"),
        ({"to": "led"}, "cannot become 'led'"),
        ({"max_position_embeddings": 16}, "would drop some of the 80 positions"),
        ({"max_position_embeddings": 0}, "at least 1"),
        ({"max_position_embeddings": "long"}, "at least 1"),
        ({"max_target_position_embeddings": 99}, "is for encoder-decoders"),
        ({"to": "longformer", "pattern": "full()"}, "windows of longformer"),
        ({"dst": 3}, "dst is 3; it must be the path of a folder"),
        ({"dst": ""}, "dst is ''; it must be the path of a folder"),
        ({"to": ["longformer"]}, r"cannot become \['longformer'\]"),
        ({"head": "CausalLM"}, "is to be loaded as AutoModelForCausalLM, which cannot be converted"),
        ({"head": 3}, "head=3 is unknown; it must be one of"),
        ({"head": ["MaskedLM"]}, r"head=\['MaskedLM'\] is unknown"),
        ({"pattern": 3}, "3"),
        ({"pattern": [3]}, "3"),
        ({"attention_window": "8"}, "must be an integer, such as 512"),
        ({"max_position_embeddings": True}, "max_position_embeddings=True must be an integer"),
        ({"global_projections": "yes"}, "global_projections='yes'; it must be bool"),
    ],
)
def test_refused_before_weights_are_loaded(
    bert: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(conversion, "load_source", lambda *_: pytest.fail("weights were loaded"))
    with pytest.raises(hea.ConfigurationError, match=message):
        hea.convert(bert, **options)


def test_tables_larger_than_memory_are_refused(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one sentence, where torch would say that it cannot allocate so many bytes."""
    monkeypatch.setattr(conversion, "load_source", lambda *_: pytest.fail("weights were loaded"))
    assert configs.memory_bytes() is None or configs.memory_bytes() > 2**28
    monkeypatch.setattr(configs, "memory_bytes", lambda: 2**36)
    with pytest.raises(hea.ConfigurationError, match=r"needs a table of learned positions of \d+ GiB, .* has 64 GiB"):
        hea.convert(bert, max_position_embeddings=2**31 - 1)


@pytest.mark.filterwarnings("ignore:Left out", "ignore:Even with parity")
def test_a_config_is_translated_once(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, translated = COUNTERPARTS["bert"], []

    def to_ours(config: Any, *args: Any) -> dict[str, Any]:
        translated.append(config)
        return table.to_ours(config, *args)

    monkeypatch.setitem(COUNTERPARTS, "bert", replace(table, to_ours=to_ours))
    hea.convert(bert, parity=True)
    assert len(translated) == 1


def test_answers_have_two_labels_whatever_the_config_says(tmp_path: Path) -> None:
    """A BART has three by default; its class for question answering counts two."""
    in_tree("bart", "AutoModelForQuestionAnswering", num_labels=3).save_pretrained(tmp_path / "bart")
    change_config(tmp_path / "bart", id2label={0: "a", 1: "b", 2: "c"}, label2id={"a": 0, "b": 1, "c": 2})
    assert hea.convert(tmp_path / "bart").config.id2label == {0: "LABEL_0", 1: "LABEL_1"}


@pytest.mark.parametrize("src", [3, None, [], torch.nn.Linear(2, 2), {"model_type": "bert"}], ids=type)
def test_sources_are_paths_or_models(src: Any) -> None:
    with pytest.raises(hea.ConfigurationError, match="it must be a folder, a name on the Hub, or a model in memory"):
        hea.convert(src)


def test_a_config_of_no_activation_is_blamed(bert: Path) -> None:
    change_config(bert, hidden_act="nope")
    with pytest.raises(hea.EfficientAttentionError, match="hidden_act='nope'") as caught:
        hea.convert(bert)
    assert "again" not in str(caught.value)


@pytest.mark.filterwarnings("ignore:Left out")
def test_mixed_dtypes_are_named(bert: Path) -> None:
    file = bert / "model.safetensors"
    weights = {name: each if "LayerNorm" in name else each.half() for name, each in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})
    change_config(bert, dtype="float16")
    with pytest.warns(UserWarning, match=r"all its weights become float16\. Cast from float32: embeddings\.LayerNorm"):
        ours = hea.convert(bert)
    assert {tensor.dtype for tensor in ours.parameters()} == {torch.float16}
    theirs = in_tree("bert").half()
    theirs.embeddings.LayerNorm.float()
    with pytest.warns(UserWarning, match=r"Cast from float32: embeddings\.LayerNorm\.weight"):
        hea.convert(theirs)
