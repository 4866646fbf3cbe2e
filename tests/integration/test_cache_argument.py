"""The argument that holds a cache, which transformers 5.24 has given another name."""

import inspect
from typing import Any

import pytest
import torch
from attention_models import PATTERN, build, token_ids
from models_cases import TINY
from transformers import DynamicCache

import hf_efficient_attn as hea
from hf_efficient_attn.integration.forward_context import CACHE_ARGUMENT, CACHE_NAMES


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
    with pytest.raises(hea.InputError, match="two names of the same argument"):
        model(torch.ones(1, 4, dtype=torch.long), **both)


@pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing`:FutureWarning",
    "ignore:Position ids are not:UserWarning",
    "ignore:`past_key_values` is deprecated:FutureWarning",
)
@pytest.mark.parametrize("num_beams", [1, 2])
def test_a_sparsified_decoder_generates_behind_a_prefix_of_peft(num_beams: int) -> None:
    """At every step PEFT passes the prefix anew, beside the cache of `generate`."""
    torch.manual_seed(0)
    peft = pytest.importorskip("peft")
    config = peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    model, ids = peft.get_peft_model(hea.sparsify(build("llama"), PATTERN), config).eval(), token_ids(2, 9)
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "num_beams": num_beams}
    options |= {"output_logits": True, "output_scores": True, "return_dict_in_generate": True}
    found = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
    with torch.no_grad():
        expected = model(input_ids=found.sequences[:, :-1]).logits[:, 8:]
    if num_beams == 1:
        torch.testing.assert_close(torch.stack(found.logits, 1), expected, atol=1e-5, rtol=1e-5)
    else:
        scores = expected.log_softmax(-1).gather(-1, found.sequences[:, 9:, None]).sum((1, 2))
        torch.testing.assert_close(found.sequences_scores, scores / 5, atol=1e-5, rtol=1e-5)
