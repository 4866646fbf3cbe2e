"""What programs find that choose code by `architectures`: engines with attention of their own, pipelines, TRL.

`test_stub_processes.py` starts processes that do not import the package.
"""

from pathlib import Path
from typing import Any

import pytest
import transformers
from sharing.shared_models import shared_model
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from word_tokenizer import word_tokenizer

import hf_efficient_attn as hea
from hf_efficient_attn.patterns import Band

TINY = {"vocab_size": 61, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
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
    assert saved_config(tmp_path / "llava")["architectures"] == [f"HfEfficientAttn{name}" for name in names]
    LlamaConfig(**TINY, architectures=names).save_pretrained(tmp_path / "dense")
    assert saved_config(tmp_path / "dense")["architectures"] == names


def test_families_keep_their_names_which_transformers_then_knows(tmp_path: Path) -> None:
    model = shared_model("sparse_transformer")
    model.save_pretrained(tmp_path)
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


def test_pipeline_takes_it(tmp_path: Path) -> None:
    word_tokenizer(TINY["vocab_size"]).save_pretrained(tmp_path)
    bert().save_pretrained(tmp_path)
    pipe = transformers.pipeline("fill-mask", model=str(tmp_path), device="cpu")
    assert type(pipe.model) is transformers.BertForMaskedLM
    assert pipe("w1 w2 [MASK] w3")


def test_explain_finds_the_class_by_its_saved_name(tmp_path: Path) -> None:
    shared_model("llama").save_pretrained(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert hea.explain(config, 64).model.startswith("LlamaForCausalLM (llama)")


def test_saved_again_it_has_one_prefix(tmp_path: Path) -> None:
    shared_model("llama").save_pretrained(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    config.save_pretrained(tmp_path)
    AutoModelForCausalLM.from_pretrained(tmp_path).save_pretrained(tmp_path / "again")
    for folder in (tmp_path, tmp_path / "again"):
        assert saved_config(folder)["architectures"] == ["HfEfficientAttnLlamaForCausalLM"]
