"""Generation beyond the contract: a cache that holds only what is read, and prompts given as embeddings."""

from typing import Any

import pytest
import torch
from models_cases import TINY, randomize

import hf_efficient_attn as hea
from hf_efficient_attn.integration.forward_context import CACHE_ARGUMENT

OPTIONS = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}


def causal_model(**fields: Any) -> Any:
    config = hea.SparseTransformerConfig.longformer(**{**TINY, "attention_window": 8, **fields}, is_causal=True)
    return randomize(hea.SparseTransformerForCausalLM(config).eval())


def prompt(tokens: int = 30) -> torch.Tensor:
    return torch.randint(3, 60, (2, tokens), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("rule", [None, "first", {"positions": [0, 1]}])
@pytest.mark.parametrize("padding", [0, 3])
def test_pattern_cache_gives_what_the_default_cache_gives(rule: Any, padding: int) -> None:
    model, ids = causal_model(global_tokens=rule), prompt()
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    cache = hea.PatternCache(model.config)
    small = model.generate(ids, attention_mask=mask, **{CACHE_ARGUMENT: cache}, **OPTIONS)
    assert torch.equal(small, model.generate(ids, attention_mask=mask, **OPTIONS))
    num_globals = {None: 0, "first": 1}.get(rule, 2) if not isinstance(rule, dict) else 2
    assert cache.layers[0].keys.shape[2] <= 4 + num_globals


def test_pattern_cache_refuses_what_it_cannot_hold() -> None:
    for fields in (
        {"global_tokens": {"every": 5}},
        {"global_tokens": {"token_ids": [7]}},
        {"global_tokens": "first", "global_projections": True},
    ):
        with pytest.raises(hea.ConfigurationError, match="PatternCache"):
            hea.PatternCache(causal_model(**fields).config)
    with pytest.raises(hea.ConfigurationError):
        hea.PatternCache(causal_model(global_tokens={"positions": [0, 7]}).config)
    model, ids = causal_model(), prompt()
    chosen = torch.zeros_like(ids)
    chosen[:, 0] = 1
    cache = hea.PatternCache(model.config)
    with pytest.raises(hea.InputError, match="Generate with the default cache"):
        model.generate(ids, global_attention_mask=chosen, **{CACHE_ARGUMENT: cache}, **OPTIONS)


@pytest.mark.parametrize("use_mask", [False, True])
def test_prompt_as_embeddings(use_mask: bool) -> None:
    model, ids = causal_model(global_tokens="first"), prompt(12)
    more = {"attention_mask": torch.ones_like(ids)}
    if use_mask:
        more["global_attention_mask"] = torch.zeros_like(ids)
        more["global_attention_mask"][:, 3] = 1
    expected = model.generate(ids, **more, **OPTIONS)[:, 12:]
    assert torch.equal(model.generate(inputs_embeds=model.get_input_embeddings()(ids), **more, **OPTIONS), expected)
