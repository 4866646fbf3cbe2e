"""What programs find that choose code by the names of a saved model: engines, pipelines, transformers."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from distributed import run_fresh
from sharing.shared_models import shared_model
from transformers import (
    BertConfig,
    EncoderDecoderConfig,
    Gemma3Config,
    LlamaConfig,
    PreTrainedConfig,
    SiglipVisionConfig,
)
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from word_tokenizer import word_tokenizer

import hf_efficient_attn as hea
from hf_efficient_attn.patterns import Band

BAND = Band(left=4, right=0)


def bert() -> Any:
    config = transformers.BertConfig(**TINY, max_position_embeddings=32)
    return hea.sparsify(transformers.BertForMaskedLM(config), Band(left=4, right=4))


MODELS = {"bert": bert, "llama": lambda: shared_model("llama"), "bart": lambda: shared_model("bart")}


def saved_config(folder: Path) -> dict[str, Any]:
    return PreTrainedConfig.get_config_dict(folder)[0]


def class_for_engine(folder: Path) -> Any:
    """Return the class that vLLM 0.33 and SGLang 0.5 ask whether they may replace its attention."""
    saved = saved_config(folder)
    [name] = saved["architectures"]
    assert not name.startswith(("Llama", "Bart", "Bert")), "code of their own knows no patterns"
    return getattr(transformers, name, None) or get_class_from_dynamic_module(saved["auto_map"]["AutoModel"], folder)


@pytest.mark.parametrize("name", MODELS)
def test_sparsified_model_is_saved_under_a_name_that_engines_refuse(name: str, tmp_path: Path) -> None:
    model = MODELS[name]()
    model.save_pretrained(tmp_path)
    stock = type(model).__name__
    assert saved_config(tmp_path)["architectures"] == [f"HfEfficientAttn{stock}"]
    stub = get_class_from_dynamic_module(saved_config(tmp_path)["auto_map"]["AutoModel"], tmp_path)
    for found in (class_for_engine(tmp_path), stub):
        assert not found._can_set_attn_implementation()
        with pytest.raises(hea.UnsupportedBackendError, match="would compute full attention instead"):
            found.is_backend_compatible()
    # engines load configs with the code of the repository, too
    assert issubclass(class_for_engine(tmp_path), transformers.PreTrainedModel)
    again = transformers.AutoConfig.from_pretrained(tmp_path, trust_remote_code=True)
    assert again.architectures == [f"HfEfficientAttn{stock}"]


@pytest.mark.parametrize("name", MODELS)
def test_without_its_pattern_a_model_has_its_own_name_again(name: str, tmp_path: Path) -> None:
    model = MODELS[name]()
    model.save_pretrained(tmp_path / "sparse")
    again = type(model).from_pretrained(tmp_path / "sparse")
    hea.sparsify(again, None).save_pretrained(tmp_path / "dense")
    assert saved_config(tmp_path / "dense")["architectures"] == [type(model).__name__]
    config = transformers.AutoConfig.from_pretrained(tmp_path / "sparse")
    hea.sparsify(config, None).save_pretrained(tmp_path / "config")
    assert saved_config(tmp_path / "config")["architectures"] == [type(model).__name__]


def test_pattern_of_a_part_is_enough_and_names_of_others_stay(tmp_path: Path) -> None:
    text = LlamaConfig(**TINY, attention_pattern=BAND.to_dict())
    names = ["LlavaForConditionalGeneration", "Second"]
    transformers.LlavaConfig(text_config=text, architectures=names).save_pretrained(tmp_path / "llava")
    assert "AutoModelForImageTextToText" in saved_config(tmp_path / "llava")["auto_map"]
    assert saved_config(tmp_path / "llava")["architectures"] == [f"HfEfficientAttn{name}" for name in names]
    LlamaConfig(**TINY, architectures=names).save_pretrained(tmp_path / "dense")
    assert saved_config(tmp_path / "dense")["architectures"] == names


def test_families_keep_their_names_which_transformers_then_knows(tmp_path: Path) -> None:
    shared_model("sparse_transformer").save_pretrained(tmp_path)
    saved = saved_config(tmp_path)
    assert saved["attn_implementation"] == NAME
    assert "experts_implementation" not in saved
    assert class_for_engine(tmp_path) is hea.SparseTransformerForMaskedLM
    assert not hea.SparseTransformerForMaskedLM.is_backend_compatible()


def test_saved_name_loads_the_model(tmp_path: Path) -> None:
    """As `transformers serve`, TRL and a line that many scripts have look it up."""
    shared = shared_model("llama")
    shared.save_pretrained(tmp_path)
    [name] = transformers.AutoConfig.from_pretrained(tmp_path).architectures
    options = {"trust_remote_code": True, "attn_implementation": None}
    model = getattr(transformers, name).from_pretrained(tmp_path, **options)
    assert type(model) is transformers.LlamaForCausalLM
    assert model.config.attention_pattern == shared.config.attention_pattern is not None
    assert model.config._attn_implementation == "efficient"
    assert getattr(transformers, name) is getattr(transformers, name)
    with pytest.raises(AttributeError):
        _ = transformers.HfEfficientAttnNothing


def test_explain_finds_the_class_by_its_saved_name(tmp_path: Path) -> None:
    shared_model("llama").save_pretrained(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert hea.explain(config, 64).model.startswith("LlamaForCausalLM (llama)")


NAME = "hf_efficient_attn"
TINY = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
EXPERTS = {**TINY, "num_key_value_heads": 2, "num_experts_per_tok": 2, "head_dim": 8}
CONFIGS = {
    "mixtral": lambda: transformers.MixtralConfig(**EXPERTS, num_local_experts=4),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**EXPERTS, num_experts=4, moe_intermediate_size=16),
    "gpt_oss": lambda: transformers.GptOssConfig(**EXPERTS, num_local_experts=4, layer_types=["full_attention"]),
}
LOADED_BY = {
    "llama": ["AutoModelForCausalLM", "AutoModel", "AutoModelForSequenceClassification", "LlamaForCausalLM"],
    "mixtral": ["AutoModelForCausalLM"],
    "qwen3_moe": ["AutoModelForCausalLM"],
    "t5": ["AutoModelForSeq2SeqLM", "AutoModelForTextEncoding"],
    "images and text": ["AutoModelForImageTextToText", "AutoModel", "AutoModelForCausalLM", "Gemma3ForCausalLM"],
    "two BERTs": ["AutoModelForSeq2SeqLM", "EncoderDecoderModel"],
}


def with_experts(name: str, **options: Any) -> Any:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), **options).eval()
    return hea.sparsify(model, Band(3, 0))


PART = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
IDS = torch.arange(3, 53).view(2, 25)


def images_and_text() -> Any:
    """Return a model of images and text, of which the text has a pattern."""
    vision = SiglipVisionConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4)
    text = {**PART, "head_dim": 8, "pad_token_id": 0, "layer_types": ["full_attention"] * 2}
    config = Gemma3Config(text_config=text, vision_config=vision.to_dict(), image_token_id=63)
    return hea.sparsify(transformers.Gemma3ForConditionalGeneration(config), Band(3, 0))


def two_berts() -> Any:
    """Return an encoder-decoder whose encoder alone has a pattern."""
    decoder = BertConfig(**PART, is_decoder=True, add_cross_attention=True)
    config = EncoderDecoderConfig.from_encoder_decoder_configs(BertConfig(**PART), decoder)
    model = transformers.EncoderDecoderModel(config)
    hea.sparsify(model.encoder, Band(2, 2))
    return model


PARTS: dict[str, tuple[Callable[[], Any], str, dict[str, torch.Tensor], dict[str, Any]]] = {
    "images and text": (
        images_and_text,
        "AutoModelForImageTextToText",
        {"input_ids": IDS},
        {"text_config": "hf_efficient_attn"},
    ),
    "two BERTs": (
        two_berts,
        "AutoModelForSeq2SeqLM",
        {"input_ids": IDS, "decoder_input_ids": IDS[:, :6]},
        {"encoder": "hf_efficient_attn"},
    ),
}


def t5() -> Any:
    config = transformers.T5Config(vocab_size=61, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    return hea.sparsify(transformers.T5ForConditionalGeneration(config), Band(3, 3))


def built(name: str) -> Any:
    if name in CONFIGS:
        return with_experts(name)
    return PARTS[name][0]() if name in PARTS else shared_model("llama") if name == "llama" else t5()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with what is loaded; of models with parts a copy, too, and what they compute."""
    place = tmp_path_factory.mktemp("stock")
    for name in LOADED_BY.keys() - PARTS.keys():
        built(name).save_pretrained(place / name)
    word_tokenizer(300).save_pretrained(place / "llama")
    for name, (build, _, inputs, _) in PARTS.items():
        torch.manual_seed(0)
        model = build().eval()
        for matrix in (each for each in model.parameters() if each.ndim > 1):
            torch.nn.init.normal_(matrix, std=0.2)
        model.save_pretrained(place / name)
        with torch.no_grad():
            logits = model(**inputs).logits
            full = hea.sparsify(build(), None).eval()
            full.load_state_dict(model.state_dict())
            assert not torch.allclose(full(**inputs).logits, logits, atol=1e-3)
        hea.hub.include_code(model).save_pretrained(place / f"{name}/copy")
        torch.save(inputs, place / f"{name}/copy" / "inputs.pt")
        torch.save(logits, place / f"{name}/copy" / "expected.pt")
    return place


@pytest.fixture(scope="module")
def outcomes(place: Path) -> dict[str, dict[str, str]]:
    """What transformers says to those who have not imported the package, by model and way of loading.

    What copies compute there, once they are trusted, is left beside them.
    """
    client = Path(__file__).with_name("stock_client.py")
    copies = {f"{name}/copy": auto_class for name, (_, auto_class, *_) in PARTS.items()}
    words = [sys.executable, client, json.dumps(LOADED_BY | {name: [each] for name, each in copies.items()})]
    done = run_fresh([*words, json.dumps(copies)], place, {**os.environ, "HF_HOME": str(place / ".cache")})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", [*LOADED_BY, *(f"{name}/copy" for name in PARTS)])
def test_without_the_package_no_way_leads_to_full_attention(name: str, outcomes: dict[str, dict[str, str]]) -> None:
    assert len(outcomes[name]) >= 7
    for way, sentence in outcomes[name].items():
        assert f'implementation="{NAME}"` is not supported' in sentence, f"{way}: {sentence}"


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("folder", ["{}", "{}/copy"], ids=["stub", "copy"])
def test_a_part_keeps_its_pattern(place: Path, name: str, folder: str) -> None:
    _, auto_class, inputs, implementation = PARTS[name]
    assert saved_config(place / folder.format(name))["attn_implementation"] == implementation
    model = getattr(transformers, auto_class).from_pretrained(place / folder.format(name)).eval()
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, torch.load(place / f"{name}/copy" / "expected.pt"))
        model.set_attn_implementation("sdpa")
        with pytest.raises(hea.UnsupportedBackendError, match="has an attention_pattern"):
            model(**inputs)


@pytest.mark.parametrize("name", PARTS)
def test_a_copy_loads_without_the_package(place: Path, outcomes: dict[str, dict[str, str]], name: str) -> None:
    found, expected = (torch.load(place / f"{name}/copy" / f"{what}.pt") for what in ("logits", "expected"))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", PARTS)
def test_a_copy_without_its_pattern_names_no_code(place: Path, name: str, tmp_path: Path) -> None:
    auto_class = getattr(transformers, PARTS[name][1])
    model = auto_class.from_pretrained(place / f"{name}/copy")
    hea.sparsify(model, None).save_pretrained(tmp_path / "dense")
    assert not {"auto_map", "attn_implementation"} & saved_config(tmp_path / "dense").keys()
    auto_class.from_pretrained(tmp_path / "dense", trust_remote_code=True)


@pytest.mark.parametrize("name", CONFIGS)
def test_experts_are_computed_as_their_user_says(name: str, tmp_path: Path) -> None:
    """Not as was saved, which is no choice of a user: transformers does not save that."""
    model, ids = with_experts(name, experts_implementation="eager"), torch.arange(20)[None]
    assert model.config._experts_implementation == "eager"
    model.save_pretrained(tmp_path)
    assert saved_config(tmp_path)["experts_implementation"] == NAME
    default = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]()).config._experts_implementation
    for chosen in (None, "eager", default):
        options = {} if chosen is None else {"experts_implementation": chosen}
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, **options).eval()
        assert again.config._experts_implementation == (chosen or default)
        assert again.config._attn_implementation == "efficient"
        with torch.no_grad():
            torch.testing.assert_close(again(ids).logits, model(ids).logits)
    again.set_experts_implementation("batched_mm")
    assert again.config._experts_implementation == "batched_mm"
    with pytest.raises(ValueError, match=f'experts_implementation="{NAME}"` is not supported'):
        again.set_experts_implementation(NAME)


def test_what_a_config_says_of_experts_is_saved_beside_the_name(tmp_path: Path) -> None:
    model = with_experts("mixtral")
    # the attribute that transformers saves, and does not look at again before it has loaded it
    model.config.experts_implementation = "eager"
    model.save_pretrained(tmp_path / "sparse")
    assert saved_config(tmp_path / "sparse")["experts_implementation"] == {"": NAME, "own": "eager"}
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "sparse")
    assert again.config._experts_implementation == "eager"
    hea.sparsify(model, None).save_pretrained(tmp_path / "dense")
    assert saved_config(tmp_path / "dense")["experts_implementation"] == "eager"


def test_what_the_config_of_a_part_says_of_experts_stays(tmp_path: Path) -> None:
    config = hea.sparsify(images_and_text().config, Band(3, 0))
    config.text_config.experts_implementation = "eager"
    config.experts_implementation = {"vision_config": "batched_mm"}
    config.save_pretrained(tmp_path)
    written = {"text_config": NAME, "own": {"vision_config": "batched_mm"}}
    assert saved_config(tmp_path)["experts_implementation"] == written
    again = transformers.AutoConfig.from_pretrained(tmp_path)
    assert again._experts_implementation is None
    assert again.text_config._experts_implementation == "eager"
    assert again.vision_config._experts_implementation == "batched_mm"


@pytest.mark.parametrize("name", ["mixtral", "images and text", "two BERTs"])
def test_saved_again_the_config_is_the_same_and_without_pattern_has_no_name(name: str, tmp_path: Path) -> None:
    model = built(name)
    for turn in range(3):
        model.save_pretrained(tmp_path / str(turn))
        model = type(model).from_pretrained(tmp_path / str(turn))
    config = transformers.AutoConfig.from_pretrained(tmp_path / "2")
    config.save_pretrained(tmp_path / "config")
    texts = [(tmp_path / each / "config.json").read_text() for each in ("1", "2", "config")]
    assert len(set(texts)) == 1
    assert saved_config(tmp_path / "0")["architectures"] == saved_config(tmp_path / "2")["architectures"]
    names = [{key: value for key, value in saved_config(tmp_path / each).items() if "impl" in key} for each in "01"]
    assert names[0] == names[1]
    assert names[0]["experts_implementation"] == names[0]["attn_implementation"]
    dense = hea.sparsify(model.encoder, None) and model if name == "two BERTs" else hea.sparsify(model, None)
    dense.save_pretrained(tmp_path / "dense")
    assert "implementation" not in (tmp_path / "dense" / "config.json").read_text()


def test_model_on_another_attention_is_refused_as_well(tmp_path: Path) -> None:
    """Its pattern is saved, which nothing else would follow."""
    model = shared_model("llama")
    model.set_attn_implementation("sdpa")
    model.save_pretrained(tmp_path)
    saved = saved_config(tmp_path)
    assert "attn_implementation" not in saved
    assert saved["experts_implementation"] == NAME


def test_config_that_was_loaded_before_the_package_makes_models() -> None:
    config = with_experts("mixtral").config
    # as without the package
    config._experts_implementation_internal = NAME
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert model.config._experts_implementation in ("eager", "grouped_mm")


def test_config_that_was_updated_by_another_does_not_keep_its_names() -> None:
    config = CONFIGS["mixtral"]()
    before = config.to_dict()
    config.update(with_experts("mixtral").config.to_dict())
    assert config.to_dict()["experts_implementation"] == NAME
    after = hea.sparsify(config, None).to_dict()
    assert not {"attn_implementation", "experts_implementation"} & after.keys()
    assert before.keys() <= after.keys()
