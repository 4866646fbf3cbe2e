"""Cache layers that keep the running sum: reorder, select, repeat, crop, reset, and adoption of foreign caches."""

import pytest
import torch
import transformers
from models_cases import TINY, randomize

import hf_efficient_attn as hea
from hf_efficient_attn.integration.forward_context import CACHE_ARGUMENT
from hf_efficient_attn.models.simplified_transformer.centering import (
    RunningSumStaticLayer,
    merge_heads,
)


@pytest.fixture
def model() -> hea.SimplifiedTransformerForCausalLM:
    torch.manual_seed(0)
    return randomize(hea.SimplifiedTransformerForCausalLM(hea.SimplifiedTransformerConfig(block="sas", **TINY))).eval()


def filled(model: torch.nn.Module, cache: transformers.Cache | None = None) -> transformers.Cache:
    ids = torch.arange(3, 18).view(3, 5)
    with torch.no_grad():
        return model(ids, **{CACHE_ARGUMENT: cache}, use_cache=True).past_key_values


def sums_are_right(cache: transformers.Cache, tokens: int = 5) -> bool:
    return all(
        torch.allclose(layer.value_sum, merge_heads(layer.values)[:, :tokens].sum(1, keepdim=True), atol=1e-5)
        for layer in cache.layers
    )


def resets_to_empty() -> bool:
    layer = transformers.cache_utils.DynamicLayer()
    layer.update(torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4))
    layer.reset()
    return layer.get_seq_length() == 0


def test_rows_move_with_the_sum(model: torch.nn.Module) -> None:
    cache = filled(model)
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    assert sums_are_right(cache)
    cache.batch_select_indices(torch.tensor([1, 0]))
    assert sums_are_right(cache)
    cache.batch_repeat_interleave(2)
    assert sums_are_right(cache)
    assert cache.layers[0].value_sum.shape[0] == 4


def test_cropping_drops_the_sum_and_the_next_forward_rebuilds_it(model: torch.nn.Module) -> None:
    cache = filled(model)
    cache.crop(0)
    assert sums_are_right(cache)
    cache.crop(-2)
    assert all(layer.value_sum is None for layer in cache.layers)
    with torch.no_grad():
        model(torch.tensor([[7], [8], [9]]), **{CACHE_ARGUMENT: cache})
    assert sums_are_right(cache)


@pytest.mark.parametrize("kind", [transformers.DynamicCache, transformers.StaticCache])
def test_reset_starts_over(model: torch.nn.Module, kind: type) -> None:
    if kind is transformers.DynamicCache and not resets_to_empty():
        pytest.skip("this transformers keeps the length of a dynamic cache that is reset")
    static = {"max_cache_len": 12} if kind is transformers.StaticCache else {}
    cache = filled(model, kind(config=model.config, **static))
    first = [layer.value_sum.clone() for layer in cache.layers]
    cache.reset()
    filled(model, cache)
    for before, layer in zip(first, cache.layers, strict=True):
        torch.testing.assert_close(layer.value_sum, before)


def test_static_layers_keep_their_address(model: torch.nn.Module) -> None:
    cache = filled(model, transformers.StaticCache(config=model.config, max_cache_len=12))
    assert all(isinstance(layer, RunningSumStaticLayer) for layer in cache.layers)
    address = cache.layers[0].value_sum.data_ptr()
    with torch.no_grad():
        model(torch.tensor([[7], [8], [9]]), **{CACHE_ARGUMENT: cache})
    assert cache.layers[0].value_sum.data_ptr() == address
    assert sums_are_right(cache, tokens=6)


def test_a_cache_filled_before_adoption_continues(model: torch.nn.Module) -> None:
    """Keys and values alone (an export, a hand-off between processes) are enough to go on."""
    cache = filled(model)
    bare = transformers.DynamicCache([(layer.keys, layer.values) for layer in cache.layers])
    following = torch.tensor([[7], [8], [9]])
    with torch.no_grad():
        expected = model(following, **{CACHE_ARGUMENT: cache}).logits
        actual = model(following, **{CACHE_ARGUMENT: bare}).logits
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_cache_layers_without_a_sum_still_give_the_right_mean(model: torch.nn.Module) -> None:
    class ForeignLayer(transformers.cache_utils.DynamicLayer):
        """A cache layer this package does not know, such as a quantised one."""

    cache = transformers.DynamicCache(config=model.config)
    cache.layers = [ForeignLayer() for _ in cache.layers]
    following = torch.tensor([[7], [8], [9]])
    with torch.no_grad():
        expected = model(following, **{CACHE_ARGUMENT: filled(model)}).logits
        actual = model(following, **{CACHE_ARGUMENT: filled(model, cache)}).logits
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", [transformers.DynamicCache, transformers.StaticCache])
def test_a_step_with_a_matrix_mask_leaves_the_sum_right(model: torch.nn.Module, kind: type) -> None:
    """The matrix says nothing about real tokens, so the sum is rebuilt afterwards."""
    static = {"max_cache_len": 12} if kind is transformers.StaticCache else {}
    cache = kind(config=model.config, **static)
    ids = torch.arange(3, 27).view(3, 8)
    keys = 12 if static else 6
    matrix = (torch.arange(keys) <= torch.arange(3, 6)[:, None]).expand(3, 1, 3, keys)
    with torch.no_grad():
        model(ids[:, :3], **{CACHE_ARGUMENT: cache})
        model(ids[:, 3:6], attention_mask=matrix, **{CACHE_ARGUMENT: cache})
        last = model(ids[:, 6:], **{CACHE_ARGUMENT: cache}).logits
        full = model(ids, use_cache=False).logits
    torch.testing.assert_close(last, full[:, 6:], atol=1e-5, rtol=1e-5)


def test_mask_made_for_the_whole_static_cache(model: torch.nn.Module) -> None:
    """A padding mask of max_cache_len columns, zeros where nothing is cached yet."""
    ids = torch.arange(3, 27).view(3, 8)
    mask = torch.zeros(3, 12, dtype=torch.long)
    mask[:, :8] = 1
    mask[0, :2] = 0
    cache = transformers.StaticCache(config=model.config, max_cache_len=12)
    with torch.no_grad():
        full = model(ids, attention_mask=mask[:, :8], use_cache=False).logits
        first = model(ids[:, :5], attention_mask=mask, **{CACHE_ARGUMENT: cache}).logits
        last = model(ids[:, 5:], attention_mask=mask, **{CACHE_ARGUMENT: cache}).logits
    torch.testing.assert_close(torch.cat([first, last], 1)[:, 2:], full[:, 2:], atol=1e-5, rtol=1e-5)


def test_blocks_without_centring_keep_plain_caches() -> None:
    model = hea.SimplifiedTransformerForCausalLM(hea.SimplifiedTransformerConfig(block="pre_ln", **TINY)).eval()
    assert {type(layer) for layer in filled(model).layers} == {transformers.cache_utils.DynamicLayer}


@pytest.mark.thorough
# torch's own imports warn when it compiles for the first time
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_generation_with_a_static_cache_is_compiled_by_inductor() -> None:
    """Without a skip connection, all that reads the mean is a norm, and Inductor's kernels of both would be one."""
    fields = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32}
    config = hea.SimplifiedTransformerConfig(block="sas_p", is_causal=True, vocab_size=61, pad_token_id=0, **fields)
    model = hea.SimplifiedTransformerForCausalLM(config).eval()
    ids, mask = torch.randint(3, 61, (2, 10)), torch.ones(2, 10, dtype=torch.long)
    mask[0, :3] = 0
    compiled = transformers.CompileConfig(fullgraph=True, dynamic=False)
    compiled._compile_all_devices = True
    options = {"attention_mask": mask, "max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    expected = model.generate(ids, **options)
    torch.compiler.reset()
    found = model.generate(ids, cache_implementation="static", compile_config=compiled, **options)
    assert torch.equal(found, expected)
