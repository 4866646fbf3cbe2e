"""The argument that holds a cache, which transformers 5.24 has given another name."""

import inspect
from typing import Any

import pytest
import torch
from models_cases import TINY
from transformers import DynamicCache

import hf_efficient_attn as hea
from hf_efficient_attn.attention.cache_argument import CACHE_ARGUMENT, CACHE_NAMES


@pytest.fixture(scope="module")
def model() -> Any:
    config = hea.SparseTransformerConfig(**TINY, is_causal=True, attention_pattern=hea.patterns.Band(3, 0))
    return hea.SparseTransformerForCausalLM(config).eval()


def test_both_names_are_taken_and_outputs_have_that_of_transformers(model: Any) -> None:
    ids = torch.arange(8)[None] + 3
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits[:, 5:]
        for name in CACHE_NAMES:
            cache = DynamicCache(config=model.config)
            outputs = model(ids[:, :5], **{name: cache}, use_cache=True)
            assert outputs[CACHE_ARGUMENT] is cache
            rest = model(ids[:, 5:], **{name: cache}).logits
            torch.testing.assert_close(rest, expected, atol=1e-5, rtol=1e-5)
    assert [name for name in CACHE_NAMES if name in inspect.signature(model.forward).parameters] == [CACHE_ARGUMENT]


def test_two_caches_are_refused(model: Any) -> None:
    both = {name: DynamicCache(config=model.config) for name in CACHE_NAMES}
    with pytest.raises(hea.InputError, match="two names of one argument"):
        model(torch.ones(1, 4, dtype=torch.long), **both)
