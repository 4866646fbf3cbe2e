"""Training on "efficient": Trainer, gradient checkpointing, LoRA."""

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tr
from attention_models import PATTERN, SPARSE, build, inputs_of, token_ids
from models_cases import checkpoint_activations

import hf_efficient_attn as hea
from hf_efficient_attn.messages import warn_once


@pytest.mark.parametrize("name", SPARSE)
def test_gradients_are_those_of_the_reference_with_and_without_checkpointing(name: str) -> None:
    gradients = []
    for backend, checkpointing in (("reference", False), ("blocked", False), ("blocked", True)):
        model = hea.sparsify(build(name), PATTERN).train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        for config in {
            id(module.config): module.config for module in model.modules() if hasattr(module, "config")
        }.values():
            for field in ("attention_probs_dropout_prob", "attention_dropout", "dropout", "attn_pdrop", "dropout_rate"):
                if hasattr(config, field):
                    setattr(config, field, 0.0)
        if checkpointing:
            checkpoint_activations(model)
        with hea.use_backend(backend):
            model(**inputs_of(name, "right")).logits.square().mean().backward()
        gradients.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    for expected, plain, checkpointed in zip(*gradients, strict=True):
        scale = expected.abs().max().clamp(min=1e-3)
        assert ((plain - expected).abs() / scale).max() < 1e-3
        torch.testing.assert_close(checkpointed, plain, atol=1e-5, rtol=1e-4)


def test_trainer_trains_and_saves_a_sparse_model(tmp_path: Path) -> None:
    model = hea.sparsify(build("llama"), PATTERN)
    before = model.model.layers[1].self_attn.q_proj.weight.clone()
    rows = [{"input_ids": ids, "labels": ids} for ids in token_ids(8, 12)]
    arguments = tr.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=2,
        per_device_train_batch_size=4,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = tr.Trainer(model=model, args=arguments, train_dataset=rows)
    assert torch.isfinite(torch.tensor(trainer.train().training_loss))
    assert not torch.equal(before, model.model.layers[1].self_attn.q_proj.weight)
    trainer.save_model(str(tmp_path / "saved"))
    again = tr.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert again.config.attention_pattern == PATTERN.to_dict()


# peft asks models for an attribute that transformers has renamed
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_adapters_learn_under_a_pattern() -> None:
    peft = pytest.importorskip("peft")
    model: Any = hea.sparsify(build("llama"), PATTERN)
    ids = token_ids(2, 12)
    with torch.no_grad():
        expected = model(ids).logits
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    with torch.no_grad():
        torch.testing.assert_close(adapted(ids).logits, expected)
    adapted(ids, labels=ids).loss.backward()
    learned = [name for name, parameter in adapted.named_parameters() if parameter.grad is not None]
    assert len(learned) == 8
    assert all("lora_" in name for name in learned)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", ["lora", "prompt", "prefix"])
@pytest.mark.parametrize("is_training", [True, False])
def test_training_an_adapter_warns_of_a_base_that_holds_no_pattern(
    kind: str, is_training: bool, tmp_path: Path
) -> None:
    """Once for a base that was sparsified after loading; not for one that was saved so, or is only used.

    `from_pretrained` gives models in eval mode, in which a loop of one's own may train them.
    """
    peft = pytest.importorskip("peft")
    new = {
        "lora": lambda: peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"),
        "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"),
        "prefix": lambda: peft.PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"),
    }[kind]
    warn_once.cache_clear()
    build("llama").save_pretrained(tmp_path / "dense")
    model: Any = hea.sparsify(tr.LlamaForCausalLM.from_pretrained(tmp_path / "dense"), PATTERN)
    model.save_pretrained(tmp_path / "sparse")
    saved: Any = tr.LlamaForCausalLM.from_pretrained(tmp_path / "sparse")
    ids = token_ids(2, 12)
    adapted = peft.get_peft_model(model, new()).train(is_training)
    with torch.no_grad():
        adapted(ids)
    with pytest.warns(UserWarning, match=r"will name .*dense as its base model"):
        adapted(ids)
    adapted(ids)
    adapted.save_pretrained(tmp_path / "adapter")
    # it has the pattern already
    hea.sparsify(saved, PATTERN)
    peft.get_peft_model(saved, new()).train(is_training)(ids)
    warn_once.cache_clear()
    base: Any = hea.sparsify(tr.LlamaForCausalLM.from_pretrained(tmp_path / "dense"), PATTERN)
    used = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").train(is_training)
    # virtual tokens have a gradient even then
    with torch.set_grad_enabled(kind == "lora"):
        used(ids)


def test_a_reference_model_without_the_pattern_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL loads it by the name of the model that it trains."""
    build("llama").save_pretrained(tmp_path / "dense")
    model: Any = hea.sparsify(tr.LlamaForCausalLM.from_pretrained(tmp_path / "dense"), PATTERN)
    warn_once.cache_clear()
    monkeypatch.setitem(sys.modules, "trl", sys)
    for is_sparse in (True, False):
        reference: Any = tr.LlamaForCausalLM.from_pretrained(model.name_or_path)
        reference = hea.sparsify(reference, PATTERN) if is_sparse else reference
        with nullcontext() if is_sparse else pytest.warns(UserWarning, match="reference model of TRL"):
            reference(token_ids(1, 8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_finite(dtype: torch.dtype) -> None:
    for name in ("llama", "bert"):
        model = hea.sparsify(build(name), PATTERN).to(dtype).train()
        logits = model(**inputs_of(name, "left")).logits
        logits.float().square().mean().backward()
        assert torch.isfinite(logits).all()
