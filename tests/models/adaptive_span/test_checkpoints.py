"""Spans through files: in float32 whatever the model's dtype, and equal to the bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models.adaptive_span.tiny_models import random_ids, tiny

import hf_efficient_attn as hea
from hf_efficient_attn.models.spans.module import span_modules

FIELDS = {"adaptive": {}, "dynamic": {"span": "dynamic"}, "modern": {"preset": "modern"}}


def span_parameters(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter for name, parameter in model.named_parameters() if ".spans." in name}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
def test_spans_are_loaded_in_float32(tmp_path: Path, fields: dict[str, Any], dtype: torch.dtype) -> None:
    """The spec's test 11."""
    model = tiny(**fields, span_limit=8192)
    model.save_pretrained(tmp_path)
    again = hea.AdaptiveSpanForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    before, after = span_parameters(model), span_parameters(again)
    assert before.keys() == after.keys() != set()
    for name, parameter in after.items():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, before[name]), name
    assert again.lm_head.weight.dtype == dtype
    assert again(random_ids(1, 40)).logits.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_spans_of_a_cast_model_are_saved_in_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    model = tiny(span_limit=8192).to(dtype)
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert {name: x.dtype for name, x in again.named_parameters()} == {n: x.dtype for n, x in model.named_parameters()}
    for name, parameter in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], parameter), name


def test_training_in_bfloat16_moves_spans_by_less_than_a_token() -> None:
    model = tiny(span_limit=8192, spans=[[4096.0] * 4] * 2).to(torch.bfloat16).train()
    ids = random_ids(2, 20)
    model(ids, labels=ids).loss.backward()
    torch.optim.SGD(model.parameters(), lr=1e-7 / float(span_modules(model)[0].ratio.grad.abs().max())).step()
    moved = 4096.0 - span_modules(model)[0].head_spans()
    assert 0 < float(moved.abs().max()) < 1


def test_config_of_a_frozen_model(tmp_path: Path) -> None:
    model = hea.freeze_spans(tiny(spans=[[0.1, 3.3, 12.7, 40.0], [1 / 3, 0.0, 1.25, 7.0]]))
    model.save_pretrained(tmp_path)
    again = hea.AdaptiveSpanForCausalLM.from_pretrained(tmp_path)
    assert again.config.frozen_spans == model.config.frozen_spans
    assert again.config.span_penalty == 0.0
    assert span_parameters(again) == {}
    ids = random_ids(2, 50)
    assert torch.equal(again.eval()(ids).logits, model(ids).logits)


def test_limit_and_ramp_are_saved(tmp_path: Path) -> None:
    tiny(span_limit=33, span_ramp=7, spans=[[33.0, 0.5, 1.0, 2.0]] * 2).save_pretrained(tmp_path)
    (first, _) = span_modules(hea.AdaptiveSpanModel.from_pretrained(tmp_path))
    assert (first.limit, first.ramp) == (33, 7)
    assert first.head_spans().tolist() == pytest.approx([33.0, 0.5, 1.0, 2.0])
