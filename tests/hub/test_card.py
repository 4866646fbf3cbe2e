"""Model cards: what they say, and which cards of others they leave alone."""

import ast
from pathlib import Path
from typing import Any

import pytest
import transformers
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from sharing.shared_models import MODELS, shared_model

import hf_efficient_attn as hea
from hf_efficient_attn.hub.card import BEGIN, END, TEMPLATE, fill_card, template_text
from hf_efficient_attn.patterns import Band, Full, GlobalTokens, Grid

TINY = {"vocab_size": 13, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2}
RESULT = EvalResult("text-generation", "you/data", "Data", "perplexity", 3.14159, dataset_split="test")


def llama(pattern: Any) -> Any:
    config = transformers.LlamaConfig(**TINY, max_position_embeddings=96)
    return hea.sparsify(transformers.LlamaForCausalLM(config), pattern)


@pytest.mark.parametrize("name", MODELS)
def test_card_of_every_model(name: str) -> None:
    metadata = {
        "license": "apache-2.0",
        "language": ["en", "zh-Hans"],
        "datasets": "you/data",
        "base_model": "you/base",
    }
    card = hea.hub.model_card(shared_model(name), f"you/{name}", results=[RESULT], tags="mine", **metadata)
    assert ModelCard(str(card)).data.eval_results == [RESULT]
    assert card.data.to_dict().items() >= {**metadata, "library_name": "transformers"}.items()
    assert {"efficient-attention", "hf_efficient_attn", "mine"} <= set(card.data.tags)
    assert "| text-generation | Data, test | perplexity | 3.142 |" in card.text


def test_layers_that_read_alike_share_a_line_and_the_sparsest_is_drawn() -> None:
    band, wide = Band(left=3, right=0), Band(left=7, right=0) | GlobalTokens([0])
    text = hea.hub.model_card(llama([band, band, wide])).text
    assert "In a text of 96 tokens" in text
    assert "| 0–1 | `band(3, 0)` | 3.9 |" in text
    assert r"| 2 | `band(7, 0) \| (global([0]) & causal())` |" in text
    lines = text.partition("```text\n")[2].partition("```")[0].splitlines()
    assert len(lines) == 24
    assert lines[0] == "■" + "⬚" * 23
    assert lines[1] == "■■" + "⬚" * 22


def test_a_grid_is_described_at_its_own_length() -> None:
    grid, sizes = Grid([8, 6], [Band(1, 1), Full()], 1), {**TINY, "image_size": (32, 24), "patch_size": 4}
    text = hea.hub.model_card(hea.sparsify(transformers.ViTModel(transformers.ViTConfig(**sizes)), grid)).text
    assert "In a text of 49 tokens" in text
    assert "| 0–2 | `grid([8, 6], [band(1, 1), full()], prefix_tokens=1)` | 18.1 |" in text


def test_encoder_and_decoder_have_lines_of_their_own() -> None:
    text = hea.hub.model_card(shared_model("bart")).text
    assert "| encoder 0 | `band(4, 4)` |" in text
    assert "| decoder 0 | `causal()` |" in text
    assert "Layer 0 of the encoder:" in text


def test_config_is_enough_and_a_copy_needs_no_import(tmp_path: Path) -> None:
    model = hea.hub.include_code(llama(Band(left=3, right=0)))
    model.save_pretrained(tmp_path)
    card = hea.hub.model_card(transformers.AutoConfig.from_pretrained(tmp_path), "you/model")
    assert "`LlamaForCausalLM` is a model of Transformers" in card.text
    assert 'AutoModelForCausalLM.from_pretrained("you/model", trust_remote_code=True)' in card.text
    assert "import hf_efficient_attn" not in card.text


def test_base_model_is_the_name_on_the_hub_that_it_was_loaded_from(tmp_path: Path) -> None:
    model = llama(Band(left=3, right=0))
    for name, expected in {"meta/Llama": "meta/Llama", "you/model": None, str(tmp_path): None, "": None}.items():
        model.config._name_or_path = name
        assert hea.hub.model_card(model, "you/model").data.base_model == expected


def test_attention_that_cannot_be_explained_or_drawn_is_said_so() -> None:
    far = hea.hub.model_card(llama(Band(left=3, right=0) | GlobalTokens([1000]))).text
    assert "The pattern is not drawn: " in far
    # two models in one have no layers by number
    parts = (transformers.BertConfig(**TINY), transformers.BertConfig(**TINY, attention_pattern=Band(3, 3).to_dict()))
    joined = hea.hub.model_card(transformers.EncoderDecoderConfig.from_encoder_decoder_configs(*parts)).text
    assert "EncoderDecoderConfig combines two models" in joined


def test_other_models_are_refused() -> None:
    with pytest.raises(hea.ConfigurationError, match="not LlamaForCausalLM"):
        hea.hub.model_card(hea.sparsify(llama(Band(left=3, right=0)), None))


@pytest.mark.parametrize("name", ['we:ird "na\nme"', "a/b/c", "no/folder/here", 3])
def test_a_name_that_the_hub_would_refuse_is_refused(name: Any) -> None:
    with pytest.raises(hea.ConfigurationError, match="repo_id is .*; it must be a name on the Hub"):
        hea.hub.model_card(llama(Band(left=3, right=0)), name)


def test_a_folder_is_loaded_by_its_path(tmp_path: Path) -> None:
    folder = tmp_path / 'a "folder"'
    folder.mkdir()
    text = hea.hub.model_card(llama(Band(left=3, right=0)), str(folder)).text
    [line] = [line for line in text.splitlines() if "from_pretrained(" in line]
    [loaded] = [each for each in ast.walk(ast.parse(line)) if isinstance(each, ast.Constant)]
    assert loaded.value == str(folder)


def test_only_the_template_and_our_own_part_are_written_over(tmp_path: Path) -> None:
    file, model = tmp_path / "README.md", llama(Band(left=3, right=0))
    data = ModelCardData(tags=["mine"], library_name="transformers")
    template = ModelCard.from_template(data, model_description=TEMPLATE)
    template.data.license = "mit"
    template.save(file)
    fill_card(model, tmp_path, "you/model")
    written = ModelCard.load(file)
    assert "# model" in written.text
    assert written.data.license == "mit"
    assert "mine" in written.data.tags
    theirs = "---\nlicense: mit\n---\n# Theirs\n"
    for kept in (theirs, str(template).replace("More Information Needed", "By me", 1), "no metadata\n"):
        file.write_text(kept)
        fill_card(model, tmp_path, "you/model")
        assert file.read_text() == kept
    file.write_text(f"{theirs}{BEGIN}\nof an older pattern\n{END}\nmine\n")
    fill_card(model, tmp_path, "you/model")
    text = file.read_text()
    assert "band(3, 0)" in text
    assert "older" not in text
    assert text.startswith(theirs)
    assert text.endswith(f"{END}\nmine\n")


def test_template_is_that_of_this_version_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> None:
        raise transformers.utils.hub.EntryNotFoundError("README.md")

    monkeypatch.setattr(ModelCard, "load", missing)
    assert transformers.utils.hub.create_and_tag_model_card("you/model").text.strip() == template_text()


def test_saving_to_a_folder_writes_no_card(tmp_path: Path) -> None:
    llama(Band(left=3, right=0)).save_pretrained(tmp_path)
    assert not (tmp_path / "README.md").exists()
