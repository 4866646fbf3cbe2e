"""Threads that share a model, a module or a cache get what each would get alone."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from interleaved import at_every_line
from thread_stress import count_wrong
from torch import Tensor, nn

import hf_efficient_attn as hea
from hf_efficient_attn.attention.select import preferred_backend, use_backend
from hf_efficient_attn.integration.layer_patterns import module_pattern
from hf_efficient_attn.integration.masks import TABLE_DTYPE, read_table
from hf_efficient_attn.layout import dense_mask
from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.models.sparse.attention import remembered
from hf_efficient_attn.patterns import Band, Causal, Pattern

CPU = torch.device("cpu")


def table_with_padding(num_masked: int) -> Tensor:
    return (torch.arange(6) >= num_masked).to(TABLE_DTYPE)[None, None, None]


def test_token_table_of_another_thread() -> None:
    mine, other = table_with_padding(1), table_with_padding(4)
    for _ in range(2):
        tokens, _ = at_every_line(
            lambda: read_table(mine, 1, 6, 6), lambda: read_table(other, 1, 6, 6), "integration.masks"
        )
        assert tokens.key_mask.sum() == 5


def test_layers_share_the_mask_of_a_table() -> None:
    table = table_with_padding(1)
    first = read_table(table, 1, 6, 6)
    read_table(table_with_padding(2), 1, 6, 6)
    assert read_table(table, 1, 6, 6) is first
    table[..., 1] = 0
    assert read_table(table, 1, 6, 6)[0].key_mask.sum() == 4  # type: ignore[union-attr]


def test_masks_of_another_thread() -> None:
    numbers = iter(range(1000, 2000))

    def mask(left: int, key_mask: Tensor) -> Tensor:
        layout = Layout(Band(left, 0), 1, 4, 4)
        return dense_mask.additive_mask(layout, TokenMask(key_mask=key_mask), 1, CPU, torch.float32)[0]  # type: ignore[return-value]

    mine, other = torch.tensor([[True, True, True, False]]), torch.tensor([[False, True, True, True]])
    expected = mask(2, mine).clone()
    for module in ("layout.dense_mask", "layout.cache"):
        assert torch.equal(at_every_line(lambda: mask(2, mine), lambda: mask(next(numbers), other), module), expected)


class Layer(nn.Module):
    """An attention layer of a model with a pattern, for both directions."""

    layer_idx = 0
    config = SimpleNamespace(
        attention_pattern={"kind": "band", "left": 3, "right": 3}, num_hidden_layers=1, _attn_implementation="efficient"
    )


def test_layer_that_another_thread_calls_causally() -> None:
    layer: Any = Layer()
    pattern = at_every_line(
        lambda: module_pattern(layer, False), lambda: module_pattern(layer, True), "integration.layer_patterns"
    )
    assert pattern == Band(3, 3)


def widened(pattern: Pattern, left: int) -> Pattern:
    return pattern | Band(left, 0)


def test_pattern_that_another_thread_makes() -> None:
    layer = Layer()
    made = at_every_line(
        lambda: remembered(layer, widened, Causal(), 1), lambda: remembered(layer, widened, Causal(), 2),
        "models.sparse.attention",
    )  # fmt: skip
    assert made == Causal() | Band(1, 0)


def test_backends_preferred_by_two_threads() -> None:
    entered, left = threading.Event(), threading.Event()

    def first() -> None:
        with use_backend("sdpa"):
            entered.set()
            left.wait(10)

    thread = threading.Thread(target=first)
    thread.start()
    assert entered.wait(10)
    with use_backend("blocked"):
        left.set()
        thread.join()
        assert preferred_backend() == "blocked"
    assert preferred_backend() == "auto"


def test_chosen_keys_of_several_threads() -> None:
    """Each with keys of its own, forward and backward."""
    q = torch.randn(1, 2, 48, 8)
    listed = [torch.randint(0, 48, (1, 2, 48, 5)) for _ in range(4)]

    def gradient(tokens: Tensor) -> Tensor:
        leaf = q.clone().requires_grad_()
        hea.attention(leaf, leaf, leaf, Causal(), chosen=hea.ChosenTokens(tokens), backend="gathered").sum().backward()
        return leaf.grad  # type: ignore[return-value]

    expected = [gradient(tokens) for tokens in listed]
    with ThreadPoolExecutor(4) as pool:
        for found in (list(pool.map(gradient, listed)) for _ in range(5)):
            assert all(torch.equal(*each) for each in zip(found, expected, strict=True))


@pytest.mark.parametrize("threads", [4])
def test_many_forwards(threads: int) -> None:
    assert count_wrong(150, threads) == 0
