"""Sinks and soft caps of transformers' models: outputs, gradients and generation equal those of their eager code."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tr
from attention_models import DECODER, SLIDING, padding, token_ids
from torch import Tensor

import hf_efficient_attn as hea
from hf_efficient_attn.patterns import Band, Full, GlobalTokens

SIDE = {name: value for name, value in DECODER.items() if name != "max_position_embeddings"} | SLIDING
EXPERTS = {**DECODER, **SLIDING, "num_local_experts": 2, "num_experts_per_tok": 2}
CONFIGS: dict[str, Callable[[], Any]] = {
    "gpt_oss": lambda: tr.GptOssConfig(**EXPERTS),
    "granite_swa": lambda: tr.GraniteSWAConfig(**DECODER, **SLIDING),
    "privacy_filter": lambda: tr.OpenAIPrivacyFilterConfig(
        **{**EXPERTS, "layer_types": ["sliding_attention"] * 2, "sliding_window": 3}
    ),
    "gemma2": lambda: tr.Gemma2Config(**DECODER, **SLIDING, attn_logit_softcapping=1.5),
    "vaultgemma": lambda: tr.VaultGemmaConfig(**DECODER, **SLIDING, attn_logit_softcapping=1.5),
    "t5gemma": lambda: tr.T5GemmaConfig(
        encoder={**SIDE, "attn_logit_softcapping": 1.5}, decoder={**SIDE, "attn_logit_softcapping": 1.5}, vocab_size=61
    ),
}
WITH_SINKS = ("gpt_oss", "granite_swa", "privacy_filter")
CAUSAL = ("gpt_oss", "granite_swa", "gemma2", "vaultgemma")


def build(name: str) -> Any:
    """Return a model with random parameters, sinks too, in evaluation mode."""
    torch.manual_seed(0)
    config = CONFIGS[name]()
    auto: Any = tr.AutoModelForCausalLM if name in CAUSAL else tr.AutoModel
    model = auto.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2)
    return model


def trained(model: Any, inputs: dict[str, Tensor], tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the first output at real tokens, and the gradients of all parameters."""
    model.zero_grad()
    out = model(**inputs)[0]
    out = out if "decoder_input_ids" in inputs else out[tokens]
    out.square().mean().backward()
    gradients = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    return out.detach(), gradients


@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("name", CONFIGS)
def test_outputs_and_gradients_are_those_of_eager(name: str, side: str) -> None:
    model, ids = build(name), token_ids(2, 40)
    mask = padding(ids, side)
    inputs = {"input_ids": ids, "attention_mask": mask}
    if name == "t5gemma":
        inputs["decoder_input_ids"] = token_ids(2, 7, seed=3)
    expected, gradients = trained(model, inputs, mask.bool())
    model.set_attn_implementation("efficient")
    found, own = trained(model, inputs, mask.bool())
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    assert own.keys() == gradients.keys()
    assert any("sinks" in key for key in own) == (name in WITH_SINKS)
    for key, gradient in gradients.items():
        torch.testing.assert_close(own[key], gradient, atol=1e-5, rtol=1e-3, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("name", CAUSAL)
def test_generation_is_that_of_eager(name: str) -> None:
    model, ids = build(name), token_ids(2, 9)
    options = {"attention_mask": padding(ids, "left"), "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, **options, eos_token_id=-1)
    model.set_attn_implementation("efficient")
    assert torch.equal(model.generate(ids, **options, eos_token_id=-1), expected)
    # full layers follow a pattern, sliding ones keep their own
    hea.sparsify(model, Band(4, 0) | GlobalTokens([0]))
    uncached = model.generate(ids, **options, eos_token_id=-1, use_cache=False)
    assert torch.equal(model.generate(ids, **options, eos_token_id=-1), uncached)


@pytest.mark.filterwarnings("ignore:output_attentions")
@pytest.mark.parametrize("name", ["gpt_oss", "gemma2"])
def test_with_weights_asked_for(name: str) -> None:
    """They are computed densely; rows with a sink sum to less than 1."""
    model, ids = build(name), token_ids(2, 12)
    expected = model(ids, output_attentions=True)
    model.set_attn_implementation("efficient")
    found = model(ids, output_attentions=True)
    torch.testing.assert_close(found.logits, expected.logits, atol=1e-5, rtol=1e-4)
    for own, other in zip(found.attentions, expected.attentions, strict=True):
        torch.testing.assert_close(own, other, atol=1e-6, rtol=1e-4)


def test_sinks_of_all_heads_are_cut_to_those_of_the_call() -> None:
    q, sinks = torch.randn(1, 6, 20, 8), torch.randn(6)
    whole = hea.attention(q, q, q, Band(4, 0), sinks=sinks)
    part = hea.attention(q[:, 2:4], q[:, 2:4], q[:, 2:4], Band(4, 0), sinks=sinks, first_head=2, num_model_heads=6)
    torch.testing.assert_close(part, whole[:, 2:4])  # type: ignore[index]


def test_a_sink_of_no_weight_is_none() -> None:
    q = torch.randn(2, 4, 50, 8)
    found = hea.attention(q, q, q, Band(4, 4), sinks=torch.full((4,), -torch.inf), return_lse=True)
    torch.testing.assert_close(found, hea.attention(q, q, q, Band(4, 4), return_lse=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sinks": torch.zeros(3)}, r"sinks has shape \[3\]; it must be \[4\]"),
        ({"sinks": torch.zeros(4, dtype=torch.int64)}, "floating-point"),
        ({"sinks": [0.0] * 4}, "sinks is list"),
        ({"softcap": 0.0}, "softcap=0"),
        ({"softcap": "a"}, "softcap='a'"),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
def test_wrong_values_are_refused(options: dict[str, Any], message: str) -> None:
    q = torch.randn(1, 4, 5, 8)
    with pytest.raises(hea.InputError, match=message):
        hea.attention(q, q, q, Full(), **options)


def test_sdpa_says_what_it_cannot() -> None:
    q = torch.randn(1, 4, 5, 8, requires_grad=True)
    with pytest.raises(hea.UnsupportedBackendError, match="cannot cap scores"):
        hea.attention(q, q, q, Full(), softcap=2.0, backend="sdpa")
    with pytest.raises(hea.UnsupportedBackendError, match="no log-sum-exp, which sinks need, with dropout"):
        hea.attention(q, q, q, Full(), sinks=torch.zeros(4), dropout=0.5, backend="sdpa")
