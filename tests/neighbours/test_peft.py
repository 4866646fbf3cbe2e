"""PEFT: every kind of adapter on every family; merged, and saved and loaded again, they compute the same."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from families import FAMILIES, READERS, WRITERS
from models_cases import first_tensor, random_ids

import hf_efficient_attn as hea

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing`:FutureWarning",
    "ignore:Position ids are not:UserWarning",
    # which PEFT's prefixes pass to models of transformers 5.24
    "ignore:`past_key_values` is deprecated:FutureWarning",
)
ADAPTERS: dict[str, Callable[..., Any]] = {
    "lora": partial(peft.LoraConfig, target_modules="all-linear", r=2),
    "dora": partial(peft.LoraConfig, target_modules="all-linear", r=2, use_dora=True),
    "ia3": partial(peft.IA3Config, target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "prompt": partial(peft.PromptTuningConfig, num_virtual_tokens=3),
    "p_tuning": partial(peft.PromptEncoderConfig, num_virtual_tokens=3, encoder_hidden_size=8),
    "prefix": partial(peft.PrefixTuningConfig, num_virtual_tokens=3),
}
MERGED = ("lora", "dora", "ia3")
REFUSED = {
    (family.name, kind): family.refuses[kind] for family in FAMILIES for kind in ADAPTERS if kind in family.refuses
}
PAIRS = [(family.name, kind) for kind in ADAPTERS for family in FAMILIES if (family.name, kind) not in REFUSED]
TASKS = {"AutoModelForCausalLM": "CAUSAL_LM", "AutoModelForSeq2SeqLM": "SEQ_2_SEQ_LM"}


def base_model(family: str) -> Any:
    """Return what writes texts, or else the backbone of what reads them."""
    return WRITERS[family].model() if family in WRITERS else READERS[family].model("AutoModel")


def adapted(family: str, kind: str) -> Any:
    """Return a model with a new adapter."""
    task = TASKS[WRITERS[family].main_head] if family in WRITERS else "FEATURE_EXTRACTION"
    return peft.get_peft_model(base_model(family), ADAPTERS[kind](task_type=task)).eval()


def inputs_of(model: Any) -> dict[str, torch.Tensor]:
    inputs = {"input_ids": random_ids(2, 9), "attention_mask": torch.ones(2, 9, dtype=torch.long)}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = random_ids(2, 5)
    return inputs


def train_a_step(model: Any, inputs: dict[str, torch.Tensor]) -> None:
    """Move every parameter that is trained, all of which must get finite gradients."""
    first_tensor(model(**inputs)).square().mean().backward()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert trained
    with torch.no_grad():
        for parameter in trained:
            if parameter.grad is not None:
                assert parameter.grad.isfinite().all()
                parameter.add_(torch.randn_like(parameter) * 0.1)
    assert any(parameter.grad is not None and parameter.grad.any() for parameter in trained)


@pytest.mark.parametrize(("family", "kind"), PAIRS)
def test_adapters(family: str, kind: str, tmp_path: Path) -> None:
    model = adapted(family, kind)
    inputs = inputs_of(model)
    torch.manual_seed(0)
    train_a_step(model, inputs)
    with torch.no_grad():
        expected = first_tensor(model(**inputs))
        model.save_pretrained(tmp_path)
        loaded = peft.PeftModel.from_pretrained(base_model(family), tmp_path).eval()
        torch.testing.assert_close(first_tensor(loaded(**inputs)), expected, atol=1e-5, rtol=1e-5)
        if kind in MERGED:
            merged = loaded.merge_and_unload()
            torch.testing.assert_close(first_tensor(merged(**inputs)), expected, atol=1e-4, rtol=1e-4)
            assert not any("lora" in name or "ia3" in name for name in merged.state_dict())


def test_prefixes_before_global_projections_are_refused() -> None:
    config = hea.SparseTransformerConfig.longformer(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4
    )
    model = peft.get_peft_model(
        hea.SparseTransformerModel(config),
        peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="FEATURE_EXTRACTION"),
    )
    with pytest.raises(hea.UnsupportedBackendError, match="Prefix tuning cannot"):
        model(input_ids=random_ids(2, 9))


@pytest.mark.parametrize(("family", "kind"), REFUSED)
def test_adapters_that_lack_something_are_refused(family: str, kind: str) -> None:
    model = adapted(family, kind)
    with pytest.raises(hea.UnsupportedBackendError, match=REFUSED[family, kind]):
        model(**inputs_of(model))
