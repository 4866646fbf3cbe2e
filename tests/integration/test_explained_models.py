"""What `explain` says of models that run on something else, and of keys that are chosen."""

from typing import Any

import pytest
import transformers

import hf_efficient_attn as hea


def test_a_model_that_runs_otherwise_says_so() -> None:
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
    config = transformers.MistralConfig(**sizes, vocab_size=13, intermediate_size=32, sliding_window=16)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    (note,) = hea.explain(model, 64).notes
    assert "attn_implementation='sdpa'" in note
    assert 'model.set_attn_implementation("efficient")' in note
    model.set_attn_implementation("efficient")
    assert not hea.explain(model, 64).notes


@pytest.mark.parametrize("config", [hea.RoutingTransformerConfig.enwik8(), hea.RoutingTransformerConfig.wikitext103()])
def test_no_more_pairs_are_allowed_than_computed(config: Any) -> None:
    explanation = hea.explain(config, 4096)
    assert explanation.allowed_pairs <= explanation.computed_pairs <= explanation.total_pairs
