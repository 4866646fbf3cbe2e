"""The layer whose buffers have room: the same keys as a layer that joins tensors, whatever is done to it in between."""

import copy
from typing import Any

import pytest
import torch

from hf_efficient_attn.attention.cache_layers import Padding, PatternLayer
from hf_efficient_attn.models.spans.cache_layer import ROOM_TOKENS, SpanLayer

LEFT = 40


def both() -> tuple[SpanLayer, PatternLayer]:
    return SpanLayer(LEFT), PatternLayer(0, LEFT, Padding())


def feed(layers: tuple[Any, Any], counts: list[int], batch_size: int = 2) -> None:
    """Append so many tokens each time, and compare what the layers return and hold."""
    for count in counts:
        new = [torch.randn(batch_size, 3, count, 4) for _ in range(2)]
        (keys, values), expected = (layer.update(*new) for layer in layers)
        assert torch.equal(keys, expected[0])
        assert torch.equal(values, expected[1])
        assert torch.equal(layers[0].keys, layers[1].keys)
        assert torch.equal(layers[0].values, layers[1].values)
        assert layers[0].get_seq_length() == layers[1].get_seq_length()


@pytest.mark.parametrize("first", [1, 5, LEFT, 100])
def test_tokens_one_by_one(first: int) -> None:
    feed(both(), [first, *[1] * (3 * ROOM_TOKENS), 3, 2, 100, 1, 1])


def test_a_new_token_moves_no_other() -> None:
    layer, _ = both()
    layer.update(*torch.randn(2, 1, 3, LEFT, 4))
    layer.update(*torch.randn(2, 1, 3, 1, 4))
    place = layer.keys.untyped_storage().data_ptr()
    before = layer.keys.clone()
    for _ in range(ROOM_TOKENS - 1):
        layer.update(*torch.randn(2, 1, 3, 1, 4))
        assert layer.keys.untyped_storage().data_ptr() == place
    assert torch.equal(layer.keys[:, :, : LEFT - ROOM_TOKENS + 1], before[:, :, ROOM_TOKENS - 1 :])


def test_what_was_returned_stays() -> None:
    layer, _ = both()
    layer.update(*torch.randn(2, 1, 3, LEFT, 4))
    returned = [layer.update(*torch.randn(2, 1, 3, 1, 4))[0] for _ in range(3 * ROOM_TOKENS)]
    for before, after in zip(returned, returned[1:], strict=False):
        assert torch.equal(before[:, :, 1:], after[:, :, :-1])


def test_batches_change_between_tokens() -> None:
    layers = both()
    feed(layers, [10, 1, 1])
    for layer in layers:
        layer.reorder_cache(torch.tensor([1, 0]))
    feed(layers, [1, 1])
    for layer in layers:
        layer.batch_repeat_interleave(2)
    feed(layers, [1, 1], batch_size=4)
    for layer in layers:
        layer.batch_select_indices(torch.tensor([3]))
    feed(layers, [1, 1], batch_size=1)
    for layer in layers:
        layer.reset()
    feed(layers, [7, 1], batch_size=3)


def test_a_copy_goes_its_own_way() -> None:
    layers = both()
    feed(layers, [10, 1, 1])
    copied = copy.deepcopy(layers)
    feed(layers, [1, 1])
    feed(copied, [1, 1])


def test_inference_mode_ends() -> None:
    layers = both()
    with torch.inference_mode():
        feed(layers, [10, 1])
    feed(layers, [1, 1])
    with torch.inference_mode():
        feed(layers, [1])


def test_gradients_flow_through_new_keys() -> None:
    layer, _ = both()
    layer.update(*torch.randn(2, 1, 3, 5, 4))
    new = torch.randn(1, 3, 1, 4, requires_grad=True)
    keys, _ = layer.update(new, new)
    keys.sum().backward()
    assert torch.equal(new.grad, torch.ones_like(new))
