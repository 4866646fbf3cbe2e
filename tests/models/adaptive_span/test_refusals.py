"""Configs, checkpoints and calls that are refused, with what to do instead."""

from pathlib import Path
from typing import Any

import pytest
import torch
from models.adaptive_span.tiny_models import SPANS, random_ids, tiny
from models_cases import TINY

import hf_efficient_attn as hea
from hf_efficient_attn.models.spans.module import span_modules

SHAPE = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "span_limit": 40}
FROZEN = {"frozen_spans": SPANS, "span_penalty": 0.0}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"span": "learned"}, r"span='learned'; it must be one of: fixed, adaptive, dynamic"),
        ({"span_limit": 0}, "span_limit=0 must be at least 1"),
        ({"span_ramp": 0}, "span_ramp=0 must be at least 1"),
        ({"span_init": 20.0}, r"a share of span_limit, from 0 to 1; 20 tokens are span_init=0\.5"),
        ({"span_init": -0.1}, "a share of span_limit"),
        ({"span_penalty": -1e-6}, "span_penalty=-1e-06 must be a number of at least 0"),
        ({"span_penalty": float("nan")}, "span_penalty=nan must be a finite number"),
        ({"span_penalty": float("inf")}, "span_penalty=inf must be a finite number"),
        (
            {"is_causal": False, "include_self": False, "position_embedding_type": "rope"},
            "include_self=False .* needs is_causal=True",
        ),
        ({"is_causal": False, "include_self": True}, "'relative_keys' has a vector for every distance to the past"),
        ({"position_embedding_type": "learned"}, "it must be one of: relative_keys, rope, none"),
        ({"hidden_size": 36, "position_embedding_type": "rope"}, "even head size, not 9"),
        ({"num_attention_heads": 5}, "does not divide hidden_size=32"),
        ({**FROZEN, "span": "dynamic"}, "every token chooses its span, .* Train with span='adaptive'"),
        ({"frozen_spans": SPANS}, r"span_penalty=2e-06 with frozen_spans: .* Set span_penalty=0\.0"),
        ({**FROZEN, "frozen_spans": SPANS[:1]}, r"lists \[4\] spans; it needs a list of 4 \(heads\) for each of 2"),
        ({**FROZEN, "frozen_spans": [[1.0] * 4, [1.0] * 3]}, r"lists \[4, 3\] spans"),
        ({**FROZEN, "frozen_spans": [[1.0] * 4, [40.5] * 4]}, r"holds \[40\.5, .*; spans are 0 to span_limit=40"),
        ({**FROZEN, "frozen_spans": [[1.0] * 4, [float("nan")] * 4]}, "spans are 0 to span_limit=40"),
    ],
)
def test_configs(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(hea.ConfigurationError, match=message):
        hea.AdaptiveSpanConfig(**{**SHAPE, **fields})


def test_fields_changed_after_the_config_was_built() -> None:
    config = hea.AdaptiveSpanConfig(**SHAPE)
    config.span_init = 2.0
    with pytest.raises(hea.ConfigurationError, match="span_init"):
        hea.AdaptiveSpanModel(config)


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


def test_checkpoint_of_another_family(tmp_path: Path) -> None:
    hea.SimplifiedTransformerConfig().save_pretrained(tmp_path)
    with pytest.raises(hea.CheckpointError, match="holds a 'simplified_transformer' model"):
        hea.AdaptiveSpanForCausalLM.from_pretrained(tmp_path)


def test_head_of_the_other_direction() -> None:
    with pytest.raises(hea.ConfigurationError, match="AdaptiveSpanForMaskedLM needs is_causal=False"):
        hea.AdaptiveSpanForMaskedLM(hea.AdaptiveSpanConfig(**SHAPE))
    with pytest.raises(hea.ConfigurationError, match="AdaptiveSpanForCausalLM needs is_causal=True"):
        hea.AdaptiveSpanForCausalLM(hea.AdaptiveSpanConfig.modern(**SHAPE, is_causal=False))


def test_kernels_that_would_drop_the_spans() -> None:
    model = tiny()
    for name in ("flash_attention_2", "vllm", "paged|eager"):
        model.config._attn_implementation = name
        with pytest.raises(hea.UnsupportedBackendError, match="would drop the attention pattern"):
            model(random_ids(1, 5))


def test_sparsify_has_no_say_over_spans() -> None:
    simplified = hea.SimplifiedTransformerForCausalLM(hea.SimplifiedTransformerConfig(**TINY, span="adaptive"))
    for model in (tiny(), simplified, simplified.config):
        with pytest.raises(hea.ConfigurationError, match="span='adaptive': its heads .* would follow no pattern"):
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
    with pytest.raises(hea.ConfigurationError, match=r"config.span_limit=20, but .* built with 40.*set_span_limit"):
        model(random_ids(1, 5))


def test_spans_that_are_no_numbers_are_named() -> None:
    model = tiny()
    span_modules(model)[1].ratio.data[2] = float("nan")
    with pytest.raises(hea.InputError, match=r"spans of layer 1 are .*nan.*training has diverged"):
        model(random_ids(1, 5))


def test_a_pattern_cache_is_refused_with_the_cache_that_spans_have() -> None:
    model = tiny()
    with pytest.raises(hea.ConfigurationError, match="span='adaptive'. Call generate without a cache"):
        hea.PatternCache(model.config)
    model.generate(random_ids(1, 4), max_new_tokens=2)


@pytest.mark.parametrize("held_by", ["ds_id", "_hp_mapping"], ids=["ZeRO-3", "ZeRO-2"])
def test_spans_that_an_optimizer_overwrites(held_by: str) -> None:
    """DeepSpeed's ZeRO marks parameters beside which it trains other numbers; tests/neighbours has the real one."""
    model = tiny().train()
    ids = random_ids(1, 8)
    setattr(span_modules(model)[0].ratio, held_by, None)
    with pytest.raises(hea.UnsupportedBackendError, match="DeepSpeed's ZeRO trains numbers of its own"):
        model(ids)
    model.eval()(ids)
    hea.freeze_spans(model)
    model.train()(ids)
