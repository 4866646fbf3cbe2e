"""`hf-efficient-attn sparsify`: a model in a folder gets a pattern, and everything else of it stays."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from attention_models import TINY
from transformers import AutoModelForCausalLM, AutoTokenizer, BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM
from word_tokenizer import word_tokenizer

import hf_efficient_attn as hea
from hf_efficient_attn.cli import main
from hf_efficient_attn.patterns import Band, GlobalTokens, Pattern

EXPRESSION, PATTERN = "band(6, 0) | global(0, 1)", Band(6, 0) | GlobalTokens([0, 1])


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A decoder of four layers in bfloat16, with a tokenizer and settings of generation."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**TINY, "num_hidden_layers": 4})).to(torch.bfloat16)
    model.generation_config.max_new_tokens = 7
    model.save_pretrained(tmp_path / "llama")
    word_tokenizer(model.config.vocab_size).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def sparsify(*arguments: Any) -> None:
    main(["sparsify", *map(str, arguments)])


@pytest.mark.parametrize(
    ("layers", "sparse"),
    [([], [0, 1, 2, 3]), (["--layers", "every-second"], [1, 3]), (["--layers", "0-1,3"], [0, 1, 3])],
    ids=str,
)
def test_a_model_with_its_tokenizer(
    layers: list[str], sparse: list[int], llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = tmp_path / "new"
    sparsify(llama, new, "--pattern", EXPRESSION, *layers)
    printed = capsys.readouterr().out
    assert f"AutoModelForCausalLM.from_pretrained({str(new)!r})" in printed
    assert f"{len(sparse)} of 4 layers" in printed
    assert "× dense causal attention" in printed
    # what is loaded is what the function makes of the model, with the same weights in the same dtype
    before, after = (AutoModelForCausalLM.from_pretrained(folder) for folder in (llama, new))
    assert type(after) is LlamaForCausalLM
    weights = after.state_dict()
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert all(weights[name].equal(weight) for name, weight in before.state_dict().items())
    assert after.generation_config.max_new_tokens == 7
    spec = after.config.attention_pattern
    found = spec if isinstance(spec, list) else [spec] * 4
    assert [each and Pattern.from_dict(each) for each in found] == [PATTERN if i in sparse else None for i in range(4)]
    ids = torch.arange(5, 25)[None]
    hea.sparsify(before, [PATTERN if layer in sparse else None for layer in range(4)])
    with torch.no_grad():
        assert after(ids).logits.equal(before(ids).logits)
    old_ids, new_ids = (AutoTokenizer.from_pretrained(folder)("w1 w2").input_ids for folder in (llama, new))
    assert old_ids == new_ids


def test_a_head_and_a_processor_are_kept(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    BertForMaskedLM(BertConfig(**TINY)).save_pretrained(old)
    (old / "preprocessor_config.json").write_text('{"size": 224}')
    sparsify(old, new, "--pattern", "band(2, 2)", "--layers", "0")
    assert type(transformers.AutoModelForMaskedLM.from_pretrained(new)) is BertForMaskedLM
    assert (new / "preprocessor_config.json").read_text() == '{"size": 224}'
    assert not (new / "tokenizer_config.json").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--layers", "0-9"], "--layers '0-9'"),
        (["--layers", "3-1"], "--layers '3-1'"),
        (["--layers", "some"], "--layers 'some'"),
        (["--pattern", "bandd(3, 0)"], "bandd"),
        (["--pattern", "per_head([band(3, 0), band(4, 0), band(5, 0)])"], "heads"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_does_not_fit_is_refused_before_weights_are_loaded(
    options: list[str], message: str, llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (llama / "model.safetensors").unlink()
    with pytest.raises(SystemExit) as stop:
        sparsify(llama, tmp_path / "new", "--pattern", EXPRESSION, *options)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_an_existing_folder_is_kept_unless_it_may_be_replaced(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = tmp_path / "new"
    BertForMaskedLM(BertConfig(**TINY)).save_pretrained(new)
    (new / "README.md").write_text("mine")
    for destination in (new, llama):
        with pytest.raises(SystemExit):
            sparsify(llama, destination, "--pattern", EXPRESSION)
    capsys.readouterr()
    sparsify(llama, new, "--pattern", EXPRESSION, "--overwrite")
    assert "README.md" in capsys.readouterr().err
    assert transformers.AutoConfig.from_pretrained(new).model_type == "llama"
    assert (new / "README.md").read_text() == "mine"


@pytest.mark.parametrize(
    ("change", "message"),
    [({"num_hidden_layers": 5}, "model.layers"), ({"architectures": ["LlamaForEverything"]}, "LlamaForEverything")],
    ids=str,
)
def test_a_config_that_does_not_fit_the_weights_is_refused(
    change: dict[str, Any], message: str, llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(SystemExit):
        sparsify(llama, tmp_path / "new", "--pattern", EXPRESSION)
    assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_weights_that_the_model_does_not_have_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As those of a second head that BERT was pretrained with."""
    transformers.BertForPreTraining(BertConfig(**TINY)).save_pretrained(tmp_path / "old")
    config = json.loads((tmp_path / "old" / "config.json").read_text())
    (tmp_path / "old" / "config.json").write_text(json.dumps({**config, "architectures": ["BertForMaskedLM"]}))
    sparsify(tmp_path / "old", tmp_path / "new", "--pattern", "band(2, 2)")
    assert "cls.seq_relationship" in capsys.readouterr().err
    assert type(transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "new")) is BertForMaskedLM
