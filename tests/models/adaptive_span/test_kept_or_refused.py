"""What a model with spans keeps or refuses when it is pickled, offloaded, refused or loaded as something else."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload

import hf_efficient_attn as hea
from hf_efficient_attn.models.spans.module import span_modules
from hf_efficient_attn.models.spans.training import average_span, max_span

SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
IDS = torch.arange(60).view(2, 30) % 32


def build(span: str = "adaptive", **fields: Any) -> hea.AdaptiveSpanForCausalLM:
    torch.manual_seed(0)
    config = hea.AdaptiveSpanConfig(**{**SIZES, "span": span, "span_limit": 24, "span_ramp": 4, **fields})
    model = hea.AdaptiveSpanForCausalLM(config).eval()
    for spans in span_modules(model):
        if span == "adaptive":
            spans.ratio.data.copy_(torch.tensor([0.0, 0.1, 0.4, 0.9]))
    return model


@pytest.mark.parametrize("span", ["fixed", "adaptive", "dynamic"])
def test_models_can_be_pickled(span: str) -> None:
    model = build(span)
    again = pickle.loads(pickle.dumps(model))
    assert torch.equal(again(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize(
    "change", [hea.freeze_spans, lambda model: hea.set_span_limit(model, 48), average_span, max_span]
)
def test_offloaded_spans_are_refused(change: Any) -> None:
    model = build()
    expected = model(IDS).logits
    cpu_offload(model)
    with pytest.raises(hea.InputError, match=r"layers \[0, 1\] are offloaded"):
        change(model)
    torch.testing.assert_close(model(IDS).logits, expected)
    assert model.config.frozen_spans is None
    assert model.config.span_limit == 24


def test_a_refused_freeze_changes_nothing() -> None:
    model = build()
    before = copy.deepcopy(model.config)
    span_modules(model)[1].ratio.data[2] = torch.nan
    with pytest.raises(hea.InputError, match=r"spans of layer 1 are \[.*nan"):
        hea.freeze_spans(model)
    assert model.config.to_dict() == before.to_dict()
    assert [spans.kind for spans in span_modules(model)] == ["adaptive", "adaptive"]


@pytest.mark.parametrize(
    "changes",
    [{"span": "fixed"}, {"span": "dynamic"}, {"span_ramp": 8}, {"frozen_spans": [[1.0] * 4] * 2, "span_penalty": 0.0}],
)
@pytest.mark.parametrize("by_config", [True, False])
def test_learned_spans_are_not_loaded_as_others(changes: dict[str, Any], by_config: bool, tmp_path: Path) -> None:
    model = build()
    model.save_pretrained(tmp_path)
    options = {"config": model.config.__class__(**{**model.config.to_dict(), **changes})} if by_config else changes
    name = next(iter(changes))
    with pytest.raises(hea.CheckpointError, match=f"saved with {name}=.*{name}=.* is asked for"):
        hea.AdaptiveSpanForCausalLM.from_pretrained(tmp_path, **options)


def test_fixed_spans_may_become_adaptive(tmp_path: Path) -> None:
    build("fixed").save_pretrained(tmp_path)
    assert span_modules(hea.AdaptiveSpanForCausalLM.from_pretrained(tmp_path, span="adaptive"))[0].kind == "adaptive"


def test_longest_dynamic_span_is_that_of_a_token() -> None:
    model = build("dynamic")
    for spans in span_modules(model):
        torch.nn.init.normal_(spans.weight, std=2.0)
    model(IDS)
    spans = span_modules(model)
    assert max_span(model) == min(24, -(-max(float(each.seen_longest.max()) for each in spans) // 1) + 4)
    assert max_span(model) > max(float(each.head_spans().max()) for each in spans) + 4


@pytest.mark.filterwarnings("ignore:output_attentions=True")
@pytest.mark.parametrize("num_heads", [1, 4])
def test_a_matrix_per_head_reaches_its_heads(num_heads: int) -> None:
    model = build()
    generator = torch.Generator().manual_seed(1)
    mask = torch.rand(1, num_heads, 30, 30, generator=generator) < 0.7
    mask |= torch.eye(30, dtype=torch.bool)
    expected = model(IDS, attention_mask=mask).logits
    with_weights = model(IDS, attention_mask=mask, output_attentions=True)
    torch.testing.assert_close(with_weights.logits, expected, atol=1e-5, rtol=1e-4)
    assert not any(weights.masked_select(~mask).any() for weights in with_weights.attentions)


def test_a_matrix_for_other_heads_is_refused() -> None:
    with pytest.raises(hea.InputError, match="attention_mask"):
        build()(IDS, attention_mask=torch.ones(1, 2, 30, 30, dtype=torch.bool))


def test_a_span_within_the_inner_keys_is_refused() -> None:
    q, k, v = (torch.randn(1, 2, 40, 8) for _ in range(3))
    term = hea.Term(torch.full((1, 2, 1, 1), 5.0), hea.SoftSpan(8, num_inner=30))
    with pytest.raises(hea.InputError, match="30 keys are within every span .* 5 tokens, which contains 6"):
        hea.attention(q, k, v, hea.patterns.Causal(), terms=[term])
