"""Memory-compressed attention equals its formula in loops, with gradients, and caches slots, rows apart."""

import copy
from typing import Any

import pytest
import torch
import transformers
from models.compressed_transformer.tiny_models import build, random_ids
from models.shared_checks import decode
from models_cases import TOLERANCE
from torch import Tensor

import hf_efficient_attn as hea
from hf_efficient_attn.integration.forward_context import CACHE_ARGUMENT


def compressed(is_causal: bool, has_null: bool, by_head: bool = True, **fields: Any) -> Any:
    fields |= {"compression_null_key": has_null, "compression_by_head": by_head}
    return build("AutoModel", mechanism="memory_compressed", is_causal=is_causal, **fields).double()


def by_slots(attention: Any, text: Tensor, is_causal: bool) -> Tensor:
    """Return the output before the last map for one text, [n, hidden_size], slot by slot and query by query."""
    stride, tokens, states = attention.stride, len(text), {}
    for which, project in (("key", attention.k_proj), ("value", attention.v_proj)):
        conv, mapped, slots = getattr(attention, f"{which}_conv"), text @ project.weight.T + project.bias, []
        for start in range(0, tokens, stride):
            # a head reads its own numbers, or all
            width, out = conv.weight.shape[1], 0.0
            for token in range(start, min(start + stride, tokens)):
                maps = conv.weight[:, :, token - start].split(width)
                out = out + torch.cat([each @ own for each, own in zip(maps, mapped[token].split(width), strict=True)])
            slots.append((out + conv.bias, start + stride - 1))
        null = getattr(attention, f"null_{which}")
        states[which] = [*([] if null is None else [(null, -1)]), *slots]
    queries, rows = text @ attention.q_proj.weight.T + attention.q_proj.bias, []
    for place in range(tokens):
        read = [index for index, (_, last) in enumerate(states["key"]) if last <= place or not is_causal]
        heads = []
        for own in (slice(head * 8, head * 8 + 8) for head in range(4)):
            scores = [(queries[place, own] * states["key"][index][0][own]).sum() / 8**0.5 for index in read]
            weights = torch.stack(scores).softmax(0) if read else []
            heads.append(
                sum(
                    (weight * states["value"][index][0][own] for weight, index in zip(weights, read, strict=True)),
                    torch.zeros(8, dtype=text.dtype),
                )
            )
        rows.append(torch.cat(heads))
    return torch.stack(rows)


@pytest.mark.parametrize("tokens", [1, 2, 7, 9])
@pytest.mark.parametrize(("has_null", "by_head"), [(False, True), (True, False)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_outputs_and_gradients_are_those_of_the_formula(
    is_causal: bool, has_null: bool, by_head: bool, tokens: int
) -> None:
    """For a text that shares its batch with a longer one, and so has padding behind it."""
    attention = compressed(is_causal, has_null, by_head).layers[0].self_attn
    text = torch.randn(2, 10, 32, dtype=torch.float64, requires_grad=True)
    real = torch.arange(10) < torch.tensor([[tokens], [10]])
    found = attention.attend(text, real, False)[0][0, :tokens]
    expected = by_slots(attention, text[0, :tokens], is_causal)
    torch.testing.assert_close(found, expected, atol=1e-11, rtol=1e-9)
    weight = torch.randn(tokens, 32, dtype=torch.float64)
    given = [text, *attention.k_proj.parameters(), *attention.key_conv.parameters(), attention.value_conv.weight]
    given += [attention.null_key, attention.null_value] if has_null else []
    if is_causal and not has_null and tokens < 3:
        assert found.count_nonzero() == 0
        return
    # before the first slot is complete, the null key alone is read
    options: dict[str, Any] = {"allow_unused": True, "materialize_grads": True}
    slopes = [torch.autograd.grad((each * weight).sum(), given, **options) for each in (found, expected)]
    for own, wanted in zip(*slopes, strict=True):
        torch.testing.assert_close(own, wanted, atol=1e-9, rtol=1e-8)


@pytest.mark.parametrize("is_causal", [False, True])
@torch.no_grad()
def test_weights_are_those_of_which_outputs_are_made(is_causal: bool) -> None:
    attention = compressed(is_causal, True).layers[0].self_attn
    text = torch.randn(2, 8, 32, dtype=torch.float64)
    out, weights = attention.attend(text, None, True)
    assert weights.shape == (2, 4, 8, 4)
    torch.testing.assert_close(out, attention.attend(text, None, False)[0])
    assert (weights[:, :, 1, 1:].count_nonzero() == 0) == is_causal
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 8, dtype=torch.float64))


@pytest.mark.parametrize("stride", [1, 3, 5])
@pytest.mark.parametrize("has_null", [False, True])
@torch.no_grad()
def test_cached_steps_of_any_size_compute_what_the_whole_text_does(has_null: bool, stride: int) -> None:
    """Rows have padding on either side and holes, so that their slots begin and end at different tokens."""
    model, ids = compressed(True, has_null, compression_tokens=stride), random_ids(4, 20)
    mask = torch.ones_like(ids)
    mask[0, :4] = mask[1, 17:] = mask[2, 3:5] = mask[2, 11] = mask[3, :19] = 0
    full = model(ids, attention_mask=mask, use_cache=False).last_hidden_state
    for cache in (transformers.DynamicCache(), transformers.StaticCache(config=model.config, max_cache_len=20)):
        found, _ = decode(model, ids, (7, 1, 1, 1, 4, 2, 1, 3), cache, mask, "last_hidden_state")
        torch.testing.assert_close(found[mask.bool()], full[mask.bool()], atol=1e-10, rtol=1e-8)
        assert cache.layers[0].keys.shape == (4, 4, stride - 1 + 20 // stride, 8)


@torch.no_grad()
def test_steps_copy_what_is_held_only_when_its_room_is_full() -> None:
    """And a cache goes on where others wrote: behind inference mode, chosen rows, a copy, and a reset."""
    model, ids = compressed(True, True), random_ids(2, 60)
    full = model(ids, use_cache=False).last_hidden_state
    cache, rooms = transformers.DynamicCache(), []
    for token in ids.split(1, 1):
        last = model(token, **{CACHE_ARGUMENT: cache}, use_cache=True).last_hidden_state
        rooms.append(cache.layers[1].held_keys.data_ptr())
    torch.testing.assert_close(last, full[:, -1:], atol=1e-10, rtol=1e-8)
    # from room for 1 slot to that for 20, by doubling
    assert 2 <= len(set(rooms)) <= 5
    cache.reset()
    with torch.inference_mode():
        model(ids[:, :30], **{CACHE_ARGUMENT: cache}, use_cache=True)
    model(ids[:, 30:40], **{CACHE_ARGUMENT: cache}, use_cache=True)
    copied = copy.deepcopy(cache)
    cache.batch_repeat_interleave(2)
    rows = cache.layers[0].keys.shape[0]
    for each, tokens in ((cache, ids.repeat_interleave(2, 0)), (copied, ids)):
        for part in (slice(40, 41), slice(41, 60)):
            last = model(tokens[:, part], **{CACHE_ARGUMENT: each}, use_cache=True).last_hidden_state
        expected = full.repeat_interleave(len(tokens) // 2, 0)
        torch.testing.assert_close(last, expected[:, 41:], atol=1e-10, rtol=1e-8)
    assert rows == 4


@torch.no_grad()
def test_a_cache_is_reordered_with_what_its_rows_have_and_no_fuller_than_its_room() -> None:
    model, ids = compressed(True, False), random_ids(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    cache = model(ids, attention_mask=mask, use_cache=True).past_key_values
    cache.reorder_cache(torch.tensor([1, 0]))
    swapped = model(ids.flip(0), attention_mask=mask.flip(0), use_cache=True).past_key_values
    for layer, other in zip(cache.layers, swapped.layers, strict=True):
        assert layer.counts.tolist() == other.counts.tolist() == [9, 7]
        for row, count in enumerate((9, 7)):
            waiting, complete = count % 3, count // 3
            for found, wanted in ((layer.keys, other.keys), (layer.values, other.values)):
                torch.testing.assert_close(found[row, :, :waiting], wanted[row, :, :waiting])
                torch.testing.assert_close(found[row, :, 2 : 2 + complete], wanted[row, :, 2 : 2 + complete])
    full = transformers.StaticCache(config=model.config, max_cache_len=8)
    with pytest.raises(hea.InputError, match="has room for 8 tokens and holds 0: 9 more do not fit"):
        model(ids, **{CACHE_ARGUMENT: full})


def test_the_preset_has_the_layers_and_parameters_of_the_paper() -> None:
    config = hea.CompressedTransformerConfig.t_dmca()
    assert [config.mechanism_of_layer(layer)[0] for layer in range(5)] == list("pmpmp")
    with torch.device("meta"):
        model = hea.CompressedTransformerForCausalLM(config)
    block = 4 * (512 * 512 + 512) + 2 * 512 * 2048 + 2048 + 512 + 4 * 512
    convolutions = 2 * (512 * 64 * 3 + 512)
    expected = 32_000 * 512 + 5 * block + 2 * convolutions
    assert sum(parameter.numel() for parameter in model.parameters()) == expected


@pytest.mark.parametrize("backend", ["efficient", "sdpa", "eager"])
@torch.no_grad()
def test_long_texts_are_computed_by_the_engine(backend: str) -> None:
    """Causal layers alone, by every backend; a stride of 3 and 200 tokens have blocks of all kinds."""
    attention = compressed(True, True).layers[0].self_attn
    attention.config._attn_implementation = backend
    text = torch.randn(1, 200, 32, dtype=torch.float64)
    torch.testing.assert_close(
        attention.attend(text, None, False)[0], attention.attend(text, None, True)[0], atol=TOLERANCE, rtol=TOLERANCE
    )


@pytest.mark.parametrize("by_head", [False, True])
def test_convolutions_are_torchs_and_take_what_adapters_build_of_them(by_head: bool) -> None:
    conv = compressed(True, False, by_head).layers[0].self_attn.key_conv
    states = torch.randn(2, 32, 12, dtype=torch.float64)
    torch.testing.assert_close(conv(states), torch.nn.Conv1d.forward(conv, states), atol=1e-12, rtol=1e-10)
    low = type(conv)(32, 4, conv.kernel_size, conv.stride, bias=False).double()
    torch.testing.assert_close(low(states), torch.nn.Conv1d.forward(low, states), atol=1e-12, rtol=1e-10)
