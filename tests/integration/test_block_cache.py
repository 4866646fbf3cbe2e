"""PatternCache of layers that read chosen blocks: sums of blocks instead of all keys, and the same tokens."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from attention_models import build, padding, token_ids

import hf_efficient_attn as hea
from hf_efficient_attn.attention import build_call
from hf_efficient_attn.integration.cache_layers import BlockLayer
from hf_efficient_attn.integration.forward_context import CACHE_ARGUMENT
from hf_efficient_attn.patterns import Band, BlockTopK

PATTERN = BlockTopK(block_tokens=4, num_chosen=3)
OPTIONS = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "pad_token_id": 0}


def model_of(pattern: Any = PATTERN) -> Any:
    return hea.sparsify(build("llama"), pattern)


@pytest.fixture
def only_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no choice read all keys."""
    monkeypatch.delattr(build_call, "choose_blocks")


@pytest.mark.parametrize("side", [pytest.param("none", marks=pytest.mark.thorough), "left"])
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 2}], ids=str)
def test_the_same_tokens(side: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    # prompt lookup is for one text
    model, ids, rows = model_of(), token_ids(3, 20), slice(0, 1 if "prompt_lookup_num_tokens" in options else 3)
    given, beams = {"attention_mask": padding(ids, side)[rows]}, options.get("num_beams", 1)
    ids = ids[rows]
    expected = model.generate(ids, **given, use_cache=False, num_beams=beams, **OPTIONS)
    monkeypatch.delattr(build_call, "choose_blocks")
    cache = hea.PatternCache(model.config)
    assert torch.equal(model.generate(ids, **given, **{CACHE_ARGUMENT: cache}, **options, **OPTIONS), expected)
    cache.reset()
    assert torch.equal(model.generate(ids, **given, **{CACHE_ARGUMENT: cache}, **options, **OPTIONS), expected)


@torch.no_grad()
@pytest.mark.parametrize("side", ["none", "left"])
def test_steps_are_the_whole_text(side: str, only_sums: None) -> None:
    model, ids = model_of(), token_ids(3, 40)
    mask = padding(ids, side)
    cache, whole_cache, found = hea.PatternCache(model.config), hea.PatternCache(model.config), []
    whole = model(ids, attention_mask=mask, **{CACHE_ARGUMENT: whole_cache}).logits
    for start, stop in ((0, 15), (15, 18), *((place, place + 1) for place in range(18, 40))):
        found.append(model(ids[:, start:stop], attention_mask=mask[:, :stop], **{CACHE_ARGUMENT: cache}).logits)
    torch.testing.assert_close(torch.cat(found, 1)[mask.bool()], whole[mask.bool()], atol=1e-5, rtol=1e-4)
    for layer, other in zip(cache.layers, whole_cache.layers, strict=True):
        assert isinstance(layer, BlockLayer)
        torch.testing.assert_close(layer.means(), other.means())


@torch.no_grad()
def test_tokens_taken_back_and_examples_chosen(only_sums: None) -> None:
    model, ids = model_of(), token_ids(2, 40)
    mask = padding(ids, "left")
    cache = hea.PatternCache(model.config)
    model(ids[:, :33], attention_mask=mask[:, :33], **{CACHE_ARGUMENT: cache})
    model(ids[:, 33:36], attention_mask=mask[:, :36], **{CACHE_ARGUMENT: cache})
    cache.crop(-9)
    again = deepcopy(cache)
    order = torch.tensor([1, 0, 1])
    again.batch_repeat_interleave(2)
    again.batch_select_indices(torch.tensor([2, 1, 3]))
    again.reorder_cache(torch.tensor([0, 1, 2]))
    whole = model(ids, attention_mask=mask, **{CACHE_ARGUMENT: hea.PatternCache(model.config)}).logits[:, 27:]
    step = model(ids[:, 27:], attention_mask=mask, **{CACHE_ARGUMENT: cache})
    torch.testing.assert_close(step.logits, whole, atol=1e-5, rtol=1e-4)
    step = model(ids[order][:, 27:], attention_mask=mask[order], **{CACHE_ARGUMENT: again})
    torch.testing.assert_close(step.logits, whole[order], atol=1e-5, rtol=1e-4)
    assert all(layer.num_summed == 40 for layer in again.layers)


def test_gradients_and_other_layers() -> None:
    """What autograd keeps is never written over; other layers keep what they read."""
    model, ids = model_of([PATTERN, Band(3, 0)]), token_ids(2, 30)
    cache, found = hea.PatternCache(model.config), []
    for start, stop in ((0, 20), (20, 21), (21, 30)):
        found.append(model(ids[:, start:stop], **{CACHE_ARGUMENT: cache}).logits)
    expected = model(ids, use_cache=False).logits
    torch.testing.assert_close(torch.cat(found, 1), expected, atol=1e-5, rtol=1e-4)
    weight = model.model.layers[0].self_attn.k_proj.weight
    own, other = (torch.autograd.grad(each.square().sum(), weight)[0] for each in (torch.cat(found, 1), expected))
    torch.testing.assert_close(own, other, atol=1e-3, rtol=1e-3)
    assert [layer.keys.shape[2] for layer in cache.layers] == [30, 3]
