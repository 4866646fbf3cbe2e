"""Spans made constants, and moved to another limit: what is computed stays the same."""

from typing import Any

import pytest
import torch
from models.adaptive_span.tiny_models import SPANS, random_ids, tiny
from models_cases import TINY

import hf_efficient_attn as hea
from hf_efficient_attn.models.spans.module import span_modules

# one rounding of S · share away from the whole numbers at which the number of keys changes
ODD = [[0.1, 3.3, 12.7, 40.0], [0.6, 1.4, 1.25, 7.9]]


def logits(model: Any, ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, **inputs).logits


@pytest.mark.parametrize("kernel", ["efficient", "eager", "sdpa"])
@pytest.mark.parametrize("preset", ["enwik8_demo", "modern"])
def test_frozen_spans_compute_what_they_computed(preset: str, kernel: str) -> None:
    compare_frozen(tiny(preset=preset, spans=ODD), kernel)


# compiling flex, which takes seconds for every group of heads (here one), meets deprecations inside torch itself
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_frozen_spans_compute_the_same_under_flex() -> None:
    torch._dynamo.reset()
    model = tiny(preset="modern", num_hidden_layers=1, spans=[[0.1, 3.3, 12.7, 20.0]])
    compare_frozen(model, "flex_attention")


def compare_frozen(model: Any, kernel: str) -> None:
    """Compare the logits before and after a model is frozen and moved to a kernel."""
    ids = random_ids(2, 60)
    expected = logits(model, ids)
    assert hea.freeze_spans(model) is model
    model.set_attn_implementation(kernel)
    assert model.config._attn_implementation == kernel
    torch.testing.assert_close(logits(model, ids), expected, atol=1e-5, rtol=1e-5)


def test_padding_packing_and_decoding_of_a_frozen_model() -> None:
    model, ids = tiny(preset="modern", spans=ODD), random_ids(2, 30)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    positions = torch.cat((torch.arange(11), torch.arange(19))).expand(2, -1)
    inputs = [{"attention_mask": mask}, {"position_ids": positions, "use_cache": False}]
    options = {"attention_mask": mask, "max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    expected, text = [logits(model, ids, **each) for each in inputs], model.generate(ids, **options)
    hea.freeze_spans(model)
    for each, before in zip(inputs, expected, strict=True):
        torch.testing.assert_close(logits(model, ids, **each), before, atol=1e-5, rtol=1e-5)
    assert torch.equal(model.generate(ids, **options), text)


def test_frozen_spans_are_numbers_of_the_config() -> None:
    model = hea.freeze_spans(tiny(span_penalty=0.1, spans=ODD))
    torch.testing.assert_close(torch.tensor(model.config.frozen_spans), torch.tensor(ODD))
    assert model.config.span_penalty == 0.0
    assert not [name for name, _ in model.named_parameters() if "spans" in name]
    torch.testing.assert_close(span_modules(model)[1].head_spans(), torch.tensor(ODD[1]))
    again = hea.AdaptiveSpanForCausalLM(hea.AdaptiveSpanConfig.from_dict(model.config.to_dict()))
    assert again.load_state_dict(model.state_dict()).missing_keys == []


def test_spans_that_left_their_bounds_are_frozen_within() -> None:
    model = tiny(spans=[[-3.0, 3.5, 12.0, 55.0], SPANS[1]])
    expected = logits(model, random_ids(2, 50))
    hea.freeze_spans(model)
    assert model.config.frozen_spans[0] == [0.0, 3.5, 12.0, 40.0]
    torch.testing.assert_close(logits(model, random_ids(2, 50)), expected)


def test_freezing_twice_changes_nothing() -> None:
    model = hea.freeze_spans(tiny(spans=ODD))
    spans = model.config.frozen_spans
    assert hea.freeze_spans(model).config.frozen_spans == spans


def test_a_frozen_model_trains_without_a_penalty() -> None:
    model, ids = hea.freeze_spans(tiny(span_penalty=0.1)).train(), random_ids(2, 20)
    output = model(ids, labels=ids)
    output.loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    torch.testing.assert_close(output.loss, model.eval()(ids, labels=ids).loss)
    model.config.span_penalty = 0.1
    with pytest.raises(hea.ConfigurationError, match="span_penalty=0"):
        hea.AdaptiveSpanForCausalLM(model.config)


def test_models_without_numbers_to_keep() -> None:
    with pytest.raises(hea.InputError, match="span='dynamic'"):
        hea.freeze_spans(tiny(span="dynamic"))
    with pytest.raises(hea.InputError, match="span='fixed'"):
        hea.freeze_spans(tiny(span="fixed"))
    plain = hea.SparseTransformerForCausalLM(hea.SparseTransformerConfig.sliding(**TINY, is_causal=True))
    for function in (hea.freeze_spans, lambda model: hea.set_span_limit(model, 8)):
        with pytest.raises(hea.InputError, match="SparseTransformerForCausalLM"):
            function(plain)


@pytest.mark.parametrize("preset", ["enwik8_demo", "modern"])
@pytest.mark.parametrize("limit", [17, 40, 300])
def test_another_limit_computes_the_same_where_spans_fit(preset: str, limit: int) -> None:
    """Spans of at most 12 tokens, with their ramp of 4, fit into 17."""
    model, ids = tiny(preset=preset, spans=[[0.1, 3.5, 12.0, 11.9], SPANS[1]]), random_ids(2, 50)
    expected, before = logits(model, ids), [module.head_spans() for module in span_modules(model)]
    assert hea.set_span_limit(model, limit) is model
    torch.testing.assert_close(logits(model, ids), expected, atol=2e-5, rtol=1e-5)
    for module, spans in zip(span_modules(model), before, strict=True):
        torch.testing.assert_close(module.head_spans(), spans)
        assert module.limit == model.config.span_limit == limit
    if preset == "enwik8_demo":
        assert model.model.distances.weight.shape == (limit, 8)
    loss = model.train()(ids, labels=ids).loss
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_spans_beyond_a_new_limit_become_the_limit() -> None:
    model = hea.set_span_limit(tiny(), 10)
    assert [module.head_spans().tolist() for module in span_modules(model)] == [
        pytest.approx([0.0, 3.5, 10.0, 10.0]),
        pytest.approx([0.0, 0.0, 1.25, 7.0]),
    ]


def test_new_distances_start_as_the_table_does() -> None:
    model = tiny()
    old = model.model.distances.weight.clone()
    torch.manual_seed(0)
    hea.set_span_limit(model, 2000)
    table = model.model.distances.weight
    assert torch.equal(table[:40], old)
    assert table[40:].std().item() == pytest.approx(1.0, abs=0.05)


def test_shares_of_fixed_and_dynamic_spans_stay() -> None:
    assert span_modules(hea.set_span_limit(tiny(span="fixed"), 8))[0].head_spans().tolist() == [8.0] * 4
    model = tiny(span="dynamic")
    before = span_modules(model)[0].head_spans()
    torch.testing.assert_close(span_modules(hea.set_span_limit(model, 80))[0].head_spans(), 2 * before)


def test_limits_that_cannot_be() -> None:
    model, ids = hea.freeze_spans(tiny()), random_ids(1, 50)
    expected = logits(model, ids)
    for limit, message in (
        (0, "span_limit=0 must be at least 1"),
        (11, r"frozen_spans holds \[12\.0.*\]; spans are 0 to"),
    ):
        with pytest.raises(hea.ConfigurationError, match=message):
            hea.set_span_limit(model, limit)
        assert model.config.span_limit == 40
        assert torch.equal(logits(model, ids), expected)
