"""Configs, checkpoints and calls that are refused, with what to do instead."""

from pathlib import Path

import pytest
import torch
from models.adaptive_span.tiny_models import SPANS, random_ids, tiny
from models_cases import TINY

import hf_efficient_attn as hea
from hf_efficient_attn.models.spans.module import span_modules

SHAPE = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "span_limit": 40}
FROZEN = {"frozen_spans": SPANS, "span_penalty": 0.0}


@pytest.mark.parametrize("as_config", [False, True])
@pytest.mark.parametrize("limit", [20, 80])
def test_another_limit_at_load_says_what_it_would_do(tmp_path: Path, limit: int, as_config: bool) -> None:
    tiny().save_pretrained(tmp_path)
    wanted = {"span_limit": limit}
    if as_config:
        wanted = {"config": hea.AdaptiveSpanConfig.from_pretrained(tmp_path, span_limit=limit)}
    message = rf"span_limit=40, and span_limit={limit} .* {limit / 40:g} times as long.* set_span_limit\(model, {limit}"
    with pytest.raises(hea.CheckpointError, match=message):
        hea.AdaptiveSpanForCausalLM.from_pretrained(tmp_path, **wanted)
    same = hea.AdaptiveSpanForCausalLM.from_pretrained(tmp_path, span_limit=40)
    assert hea.set_span_limit(same, limit).config.span_limit == limit


@pytest.mark.parametrize("ratio", [1.001, -0.5, 300.0, float("nan"), float("inf")])
def test_damaged_spans_of_a_checkpoint(tmp_path: Path, ratio: float) -> None:
    model = tiny()
    state = model.state_dict()
    state["model.layers.1.self_attn.spans.ratio"] = torch.tensor([0.0, 0.5, ratio, 1.0])
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(
        hea.CheckpointError, match=r"Layer 1 has span ratios .* from 0 to 1\. The checkpoint is damaged"
    ):
        hea.AdaptiveSpanForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(hea.CheckpointError, match="Layer 1"):
        hea.AdaptiveSpanForCausalLM.from_pretrained(tmp_path, output_loading_info=True)


def test_sparsify_has_no_say_over_spans() -> None:
    simplified = hea.SimplifiedTransformerForCausalLM(hea.SimplifiedTransformerConfig(**TINY, span="adaptive"))
    for model in (tiny(), simplified, simplified.config):
        with pytest.raises(hea.ConfigurationError, match="span='adaptive'"):
            hea.sparsify(model, hea.patterns.Band(8, 0))


def test_saving_brings_spans_within_their_bounds(tmp_path: Path) -> None:
    """A step may have moved them out since the last forward pass."""
    model = tiny()
    span_modules(model)[0].ratio.data.copy_(torch.tensor([1.2, -0.1, 0.5, 1.0]))
    model.save_pretrained(tmp_path)
    again = hea.AdaptiveSpanForCausalLM.from_pretrained(tmp_path)
    assert span_modules(again)[0].ratio.tolist() == [1.0, 0.0, 0.5, 1.0]


def test_a_limit_changed_in_the_config_of_a_model_is_refused() -> None:
    model = tiny()
    model.config.span_limit = 20
    with pytest.raises(hea.ConfigurationError, match="span_limit=20"):
        model(random_ids(1, 5))


def test_spans_that_are_no_numbers_are_named() -> None:
    model = tiny()
    span_modules(model)[1].ratio.data[2] = float("nan")
    with pytest.raises(hea.InputError, match=r"spans of layer 1 are .*nan.*training has diverged"):
        model(random_ids(1, 5))


def test_a_pattern_cache_is_refused_with_the_cache_that_spans_have() -> None:
    model = tiny()
    with pytest.raises(hea.ConfigurationError, match="span='adaptive'"):
        hea.PatternCache(model.config)
    model.generate(random_ids(1, 4), max_new_tokens=2)


@pytest.mark.parametrize("held_by", ["ds_id", "_hp_mapping"], ids=["ZeRO-3", "ZeRO-2"])
def test_spans_that_an_optimizer_overwrites(held_by: str) -> None:
    """DeepSpeed's ZeRO marks parameters beside which it trains other numbers; tests/neighbours has the real one."""
    model = tiny().train()
    ids = random_ids(1, 8)
    setattr(span_modules(model)[0].ratio, held_by, None)
    with pytest.raises(hea.UnsupportedBackendError, match="DeepSpeed"):
        model(ids)
    model.eval()(ids)
    hea.freeze_spans(model)
    model.train()(ids)
