"""A layer of a cache holds the first tokens of each example and its last ones, whatever is done to it in between."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_efficient_attn.integration.cache_layers import ROOM_TOKENS, Padding, PatternLayer

LEFT = 40
NUM_FIRST = (0, 3)


class Both:
    """A layer, and by definition what it has to hold of all tokens."""

    def __init__(self, num_first: int, pads: tuple[int, ...] = (0, 0), left: int = LEFT) -> None:
        self.num_first, self.left = num_first, left
        self.layer = PatternLayer(num_first, left, Padding())
        self.pads = torch.tensor(pads)
        self.tokens: list[Tensor] = [torch.empty(len(pads), 3, 0, 4) for _ in range(2)]
        # held by definition
        self.held = list(self.tokens)

    def feed(self, counts: list[int]) -> None:
        """Append so many tokens each time, and compare what the layer returns and holds."""
        for count in counts:
            new = [torch.randn(len(self.pads), 3, count, 4) for _ in range(2)]
            self.tokens = [torch.cat([each, more], 2) for each, more in zip(self.tokens, new, strict=True)]
            num_tokens = self.tokens[0].shape[2]
            is_token = torch.arange(num_tokens) >= self.pads[:, None]
            self.layer.padding.note(is_token)
            returned = self.layer.update(*new)
            for actual, held, more in zip(returned, self.held, new, strict=True):
                assert torch.equal(actual, torch.cat([held, more], 2))
            self.held = [self.kept(each) for each in self.tokens]
            if count % 2:
                # reading changes nothing, and need not happen
                self.check()
            assert self.layer.get_seq_length() == num_tokens

    def kept(self, tokens: Tensor) -> Tensor:
        num_kept = self.num_first + self.left
        if tokens.shape[2] <= num_kept:
            return tokens
        rows = []
        for pad, row in zip(self.pads.tolist(), tokens, strict=True):
            text = row[:, pad:]
            is_short = text.shape[1] <= num_kept
            first, last = text[:, : self.num_first], text[:, text.shape[1] - self.left :]
            rows.append(row[:, row.shape[1] - num_kept :] if is_short else torch.cat([first, last], 1))
        return torch.stack(rows)

    def check(self) -> None:
        assert torch.equal(self.layer.keys, self.held[0])
        assert torch.equal(self.layer.values, self.held[1])

    def take(self, examples: Tensor) -> None:
        self.pads = self.pads[examples]
        self.tokens = [each[examples] for each in self.tokens]
        self.held = [each[examples] for each in self.held]


@torch.no_grad()
@pytest.mark.parametrize("pads", [(0, 0), (0, 25), (60, 7)], ids=str)
@pytest.mark.parametrize("first", [1, 5, LEFT, 100])
@pytest.mark.parametrize("num_first", NUM_FIRST)
def test_tokens_one_by_one(num_first: int, first: int, pads: tuple[int, int]) -> None:
    if first <= max(pads):
        first += max(pads)
    Both(num_first, pads).feed([first, *[1] * (3 * ROOM_TOKENS), 3, 2, *[2] * ROOM_TOKENS, 100, 1, 1, 4, 4, 31, 33])


@torch.no_grad()
@pytest.mark.parametrize("counts", [[1, 20, 1, 2], [2, 7, 30, 2], [8, 8, 8, 1], [3, 1, 32, 1]], ids=str)
@pytest.mark.parametrize("left", [0, 1, 5])
def test_steps_longer_than_what_is_kept(left: int, counts: list[int]) -> None:
    for num_first in NUM_FIRST:
        for pads in ((0, 0), (0, 1)):
            Both(num_first, pads, left).feed([2, *counts])
            Both(num_first, (0, 0), left).feed(counts)


@torch.no_grad()
@pytest.mark.parametrize("num_first", NUM_FIRST)
def test_a_new_token_moves_no_other(num_first: int) -> None:
    layer = PatternLayer(num_first, LEFT, Padding())
    layer.update(*torch.randn(2, 1, 3, LEFT + num_first, 4))
    layer.update(*torch.randn(2, 1, 3, 1, 4))
    place = layer.keys.untyped_storage().data_ptr()
    before = layer.keys.clone()
    for _ in range(ROOM_TOKENS - 1):
        layer.update(*torch.randn(2, 1, 3, 1, 4))
        assert layer.keys.untyped_storage().data_ptr() == place
    kept = layer.keys[:, :, num_first : num_first + LEFT - ROOM_TOKENS + 1]
    assert torch.equal(kept, before[:, :, num_first + ROOM_TOKENS - 1 :])


@torch.no_grad()
def test_what_was_returned_stays_until_the_next_step() -> None:
    for num_first in NUM_FIRST:
        layer = PatternLayer(num_first, LEFT, Padding())
        layer.update(*torch.randn(2, 1, 3, LEFT + num_first, 4))
        for _ in range(3 * ROOM_TOKENS):
            held, new = layer.keys.clone(), torch.randn(2, 1, 3, 1, 4)
            keys, _ = layer.update(*new)
            assert torch.equal(keys, torch.cat([held, new[0]], 2))


@torch.no_grad()
@pytest.mark.parametrize("num_first", NUM_FIRST)
def test_batches_change_between_tokens(num_first: int) -> None:
    both = Both(num_first, (0, 2))
    both.feed([50, 1, 2])
    both.layer.reorder_cache(torch.tensor([1, 0]))
    both.take(torch.tensor([1, 0]))
    both.feed([1, 2, 1, 2])
    both.layer.batch_repeat_interleave(2)
    both.take(torch.tensor([0, 0, 1, 1]))
    both.feed([2, 2, 1])
    both.layer.batch_select_indices(torch.tensor([3]))
    both.take(torch.tensor([3]))
    both.feed([2, 1, 2])
    both.layer.offload()
    both.layer.prefetch()
    both.feed([2, 1, 2])
    both.layer.reset()
    assert both.layer.keys is None
    assert not both.layer.has_dropped
    again = Both(num_first, (0, 1, 0))
    again.layer = both.layer
    again.feed([7, 1])


@torch.no_grad()
@pytest.mark.parametrize("num_first", NUM_FIRST)
def test_a_copy_goes_its_own_way(num_first: int) -> None:
    both = Both(num_first)
    both.feed([50, 2, 2])
    copied = copy.deepcopy(both)
    both.feed([2, 1])
    copied.feed([2, 1])
    both.feed([2, 1])


@torch.no_grad()
@pytest.mark.parametrize("num_first", NUM_FIRST)
def test_what_others_write_into_it_stays(num_first: int) -> None:
    both = Both(num_first)
    both.feed([50, 2, 2])
    for held, tokens, write in ((both.held[0], both.tokens[0], both.layer.keys), (both.held[1], both.tokens[1], None)):
        if write is None:
            both.layer.values = both.layer.values * 2
        else:
            write.mul_(2)
        held.mul_(2)
        tokens.mul_(2)
    both.feed([2, 2, 1])


@pytest.mark.parametrize("num_first", NUM_FIRST)
def test_inference_mode_and_no_grad_end(num_first: int) -> None:
    both = Both(num_first)
    with torch.inference_mode():
        both.feed([50, 2, 2])
    both.check()
    both.feed([1, 2])
    with torch.no_grad():
        both.feed([2, 2])
    with torch.inference_mode():
        both.feed([2, 2])
    with torch.no_grad():
        both.feed([2, 2])
    both.check()


@pytest.mark.parametrize("num_first", NUM_FIRST)
def test_gradients_flow_through_new_keys_and_old_ones(num_first: int) -> None:
    layer = PatternLayer(num_first, LEFT, Padding())
    with torch.no_grad():
        for count in (50, 1):
            layer.update(*torch.randn(2, 1, 3, count, 4))
    new = torch.randn(1, 3, 1, 4, requires_grad=True)
    query = torch.randn(1, 3, 1, 4, requires_grad=True)
    keys, _ = layer.update(new, new)
    scores, expected = (query * keys).sum(), keys.sum(2, keepdim=True)
    # what autograd has saved is not changed by further tokens
    layer.update(*torch.randn(2, 1, 3, 1, 4))
    with torch.no_grad():
        layer.update(*torch.randn(2, 1, 3, 1, 4))
    scores.backward()
    assert torch.equal(new.grad, query)
    assert torch.allclose(query.grad, expected)


@torch.no_grad()
def test_dtypes_are_joined_as_cat_joins_them() -> None:
    layer = PatternLayer(2, 8, Padding())
    layer.update(*torch.randn(2, 1, 3, 12, 4))
    layer.update(*torch.randn(2, 1, 3, 1, 4))
    keys, _ = layer.update(*torch.randn(2, 1, 3, 1, 4, dtype=torch.bfloat16))
    assert keys.dtype == layer.keys.dtype == torch.float32
    with pytest.raises(RuntimeError, match="must match"):
        layer.update(*torch.randn(2, 2, 3, 1, 4))


@torch.no_grad()
def test_compiled_steps_follow_steps_that_are_not() -> None:
    def step(layer: Any, new: Tensor) -> Tensor:
        return layer.update(new, new)[0] * 1.0

    compiled = torch.compile(step, backend="eager", fullgraph=True)
    layers = [PatternLayer(2, 8, Padding()) for _ in range(2)]
    for number, count in enumerate([20, 1, 1, 1, 1, 1, 1]):
        new = torch.randn(1, 3, count, 4)
        is_compiled = number in (2, 3, 5)
        results = [(compiled if is_compiled and each is layers[1] else step)(each, new) for each in layers]
        assert torch.equal(*results)
        assert torch.equal(layers[0].keys, layers[1].keys)
