"""What is saved beside a config so that programs without the package can load it."""

import os
import runpy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig
from transformers.integrations.peft import MIN_PEFT_VERSION

import hf_efficient_attn as hea
from hf_efficient_attn.hub import auto_classes
from hf_efficient_attn.hub.stub import FILE, MODULE, stub_text
from hf_efficient_attn.patterns import Band
from hf_efficient_attn.requirements import fits

TINY = {"vocab_size": 13, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
BAND = Band(left=4, right=0)
CONFIG_ENTRY = {"AutoConfig": f"{MODULE}.AutoConfig"}


def llama() -> Any:
    return hea.sparsify(transformers.LlamaForCausalLM(LlamaConfig(**TINY)), BAND)


def saved_map(folder: Path) -> dict[str, str]:
    return PreTrainedConfig.get_config_dict(folder)[0].get("auto_map", {})


def test_sparsified_model_names_every_head_of_its_architecture(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    heads = ("", *(f"For{head}" for head in ("CausalLM", "QuestionAnswering", "SequenceClassification")))
    assert {"AutoConfig", *(f"AutoModel{head}" for head in heads)} < saved_map(tmp_path).keys()
    names = runpy.run_path(str(tmp_path / FILE))
    assert all(names[entry.removeprefix(f"{MODULE}.")] for entry in saved_map(tmp_path).values())


def test_model_whose_pattern_was_removed_needs_no_stub(tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path)
    hea.sparsify(model, None).save_pretrained(tmp_path)
    assert not (tmp_path / FILE).exists()
    assert saved_map(tmp_path) == {}
    assert not hasattr(model.config, "auto_map")


def test_dense_models_and_files_of_others_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("# of somebody else")
    LlamaConfig(**TINY).save_pretrained(tmp_path)
    assert (tmp_path / FILE).read_text() == "# of somebody else"
    assert saved_map(tmp_path) == {}


def test_folder_without_stub_gets_one_when_saved_again(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    (tmp_path / FILE).unlink()
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace(MODULE, "elsewhere"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    model.config.auto_map = {}
    model.save_pretrained(tmp_path / "again")
    assert saved_map(tmp_path / "again") == llama_map(tmp_path / "fresh")


def llama_map(folder: Path) -> dict[str, str]:
    llama().save_pretrained(folder)
    return saved_map(folder)


def test_code_of_others_keeps_its_entries(tmp_path: Path) -> None:
    model = llama()
    theirs = {"AutoModelForCausalLM": "modeling_x.X", "AutoTokenizer": ["tokenization_x.X", None]}
    model.config.auto_map = {**theirs, "AutoModel": f"somebody/repo-name--{MODULE}.AutoModel"}
    model.save_pretrained(tmp_path)
    assert saved_map(tmp_path).items() >= theirs.items()
    assert saved_map(tmp_path)["AutoModel"] == f"{MODULE}.AutoModel"


def test_pattern_of_a_part_is_enough(tmp_path: Path) -> None:
    parts = (transformers.BertConfig(**TINY), transformers.BertConfig(**TINY, attention_pattern=BAND.to_dict()))
    joined = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(*parts)
    joined.save_pretrained(tmp_path / "joined")
    assert saved_map(tmp_path / "joined").items() >= CONFIG_ENTRY.items()


def test_file_that_is_right_is_not_written_and_a_link_is_replaced(tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path)
    before = os.stat(tmp_path / FILE)
    model.save_pretrained(tmp_path)
    assert os.stat(tmp_path / FILE).st_ino == before.st_ino
    cached = tmp_path / "cached"
    cached.write_text("an older stub")
    (tmp_path / FILE).unlink()
    (tmp_path / FILE).symlink_to(cached)
    model.save_pretrained(tmp_path)
    assert cached.read_text() == "an older stub"
    assert (tmp_path / FILE).read_text() == stub_text(model.config)
    assert os.stat(tmp_path / FILE).st_mode == os.stat(tmp_path / "config.json").st_mode
    assert len(list(tmp_path.glob(".*"))) == 0


def test_model_whose_pattern_was_removed_needs_no_copy(tmp_path: Path) -> None:
    model = hea.hub.include_code(llama())
    model.save_pretrained(tmp_path)
    (tmp_path / "hea_mine.py").write_text("# of somebody else")
    assert list(tmp_path.glob("hea_*.py"))
    hea.sparsify(model, None).save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.glob("*.py")] == ["hea_mine.py"]
    assert saved_map(tmp_path) == {}


@pytest.mark.parametrize("includes", [False, True], ids=["stub", "copy"])
def test_checkpoint_that_trainer_pushes_has_it_beside_too(tmp_path: Path, includes: bool) -> None:
    """Trainer's `hub_strategy="every_save"` pushes what lies beside the checkpoint, and copies no code there."""
    model = hea.hub.include_code(llama()) if includes else llama()
    args = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    trainer = transformers.Trainer(model=model, args=args)
    trainer.hub_model_id, trainer.push_in_progress, trainer.state.global_step = "tester/model", None, 3
    checkpoint = tmp_path / "checkpoint-3"
    trainer.save_model(str(checkpoint))
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-3"]
    # in the background, where no Hub is found; a thread that goes on would disturb the next test
    trainer._push_from_checkpoint(str(checkpoint))
    trainer.push_in_progress.wait_until_done()
    code = {path.name: path.read_text() for path in tmp_path.glob("*.py")}
    assert code
    assert code == {path.name: path.read_text() for path in checkpoint.glob("*.py")}
    assert (tmp_path / "config.json").read_text() == (checkpoint / "config.json").read_text()


def test_folder_with_the_name_of_a_checkpoint_writes_nothing_beside_it(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "checkpoint-3")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-3"]


# peft asks models for an attribute that transformers has renamed
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize("loaded_by", ["peft", "transformers"])
def test_adapter_has_none_and_the_merged_model_has(tmp_path: Path, loaded_by: str) -> None:
    adapter = peft.LoraConfig(target_modules="all-linear", r=1)
    model = llama()
    if loaded_by == "transformers":
        if not fits(peft.__version__, MIN_PEFT_VERSION, None):
            pytest.skip(f"this transformers wants PEFT {MIN_PEFT_VERSION} for adapters of its own")
        model.add_adapter(adapter)
        model.save_pretrained(tmp_path / "adapter")
        assert not (tmp_path / "adapter" / FILE).exists()
        return
    adapted = peft.get_peft_model(model, adapter)
    adapted.save_pretrained(tmp_path / "adapter")
    assert not (tmp_path / "adapter" / FILE).exists()
    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    assert (tmp_path / "merged" / FILE).exists()


# peft asks models for an attribute that transformers has renamed
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize("says_more", [False, True])
def test_adapter_that_names_a_sparsified_base_is_loaded_by_its_stub(tmp_path: Path, says_more: bool) -> None:
    """As transformers does it where the code of the base is trusted."""
    llama().save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=1, init_lora_weights=False)
    adapted = peft.get_peft_model(base, config).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    options = {"config": base.config, "adapter_kwargs": {"_adapter_model_path": str(tmp_path / "adapter")}}
    stub = auto_classes.AutoModelForCausalLM
    loaded = stub.from_pretrained(tmp_path / "base", **options, output_loading_info=says_more)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal((loaded[0] if says_more else loaded)(ids).logits, adapted(ids).logits)


def test_classes_of_the_package_are_not_uploaded_but_those_of_others(tmp_path: Path) -> None:
    """`register_for_auto_class` would copy one file of a package; a user's file, that imports the package, it may."""
    try:
        hea.SparseTransformerConfig.register_for_auto_class()
        hea.SparseTransformerModel.register_for_auto_class()
        assert hea.SparseTransformerConfig._auto_class is hea.SparseTransformerModel._auto_class is None
        theirs: Any = type("Theirs", (hea.SparseTransformerModel,), {"__module__": __name__})
        theirs.register_for_auto_class("AutoModel")
        config = hea.SparseTransformerConfig.sliding(**TINY, left=2, is_causal=True)
        theirs(config).save_pretrained(tmp_path)
    finally:
        hea.SparseTransformerModel._auto_class = None
    assert saved_map(tmp_path)["AutoModel"] == "test_stub.Theirs"
    assert saved_map(tmp_path)["AutoConfig"] == f"{MODULE}.SparseTransformerConfig"
    assert {FILE, "test_stub.py"} <= {path.name for path in tmp_path.iterdir()}


def test_class_of_the_stub_leaves_no_trace_in_transformers() -> None:
    """transformers 5.16 registers what it finds in a repository for every config of that class."""
    AutoModelForCausalLM.register(LlamaConfig, auto_classes.AutoModelForCausalLM, exist_ok=True)
    auto_classes.AutoModelForCausalLM.register_for_auto_class(AutoModelForCausalLM)
    assert AutoModelForCausalLM._model_mapping[LlamaConfig] is transformers.LlamaForCausalLM
    assert auto_classes.AutoModelOfALaterVersion.__name__ == "AutoModelOfALaterVersion"
    with pytest.raises(AttributeError, match="has no attribute nothing"):
        auto_classes.nothing  # noqa: B018
