"""Masks whose memory is written again between two calls: the second gets what a new mask would get.

A collator fills one array for all batches, and `.data` is written in place; neither raises the version of a tensor.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_models import build, token_ids
from torch import Tensor

import hf_efficient_attn as hea
from hf_efficient_attn.attention.select import AUTO
from hf_efficient_attn.patterns import Band, GlobalTokens

TOKENS = 96
X = torch.randn(2, 2, TOKENS, 8, generator=torch.Generator().manual_seed(0))
FIRST = {
    "key_mask": torch.arange(TOKENS).expand(2, -1) < torch.tensor([[90], [96]]),
    "segment_ids": torch.arange(TOKENS).expand(2, -1) // 40,
    "global_mask": torch.arange(TOKENS).expand(2, -1) == torch.tensor([[3], [50]]),
}
SECOND = {
    "key_mask": torch.arange(TOKENS).expand(2, -1) < torch.tensor([[60], [31]]),
    "segment_ids": torch.arange(TOKENS).expand(2, -1) // 17,
    "global_mask": torch.arange(TOKENS).expand(2, -1) % 30 == torch.tensor([[7], [9]]),
}


def by_numpy(mask: Tensor, values: Tensor) -> None:
    mask.numpy()[...] = values.numpy()


def by_data(mask: Tensor, values: Tensor) -> None:
    mask.data[...] = values


def by_other_data(mask: Tensor, values: Tensor) -> None:
    mask.data = values.clone()


def by_version(mask: Tensor, values: Tensor) -> None:
    mask.copy_(values)


WRITES = [by_numpy, by_data, by_other_data, by_version]
# every write with every backend, of masks that take turns
BY_TURNS = [
    pytest.param(list(FIRST)[(turn + number) % 3], backend, write, id=f"{backend}-{write.__name__}")
    for turn, backend in enumerate((AUTO, "sdpa", "blocked", "reference"))
    for number, write in enumerate(WRITES)
]


@pytest.mark.parametrize(("name", "backend", "write"), BY_TURNS)
def test_attention(name: str, backend: str, write: Callable[[Tensor, Tensor], None]) -> None:
    def of(mask: Tensor) -> Tensor:
        return hea.attention(X, X, X, Band(4, 4) | GlobalTokens([0]), backend=backend, **{name: mask})  # type: ignore[return-value]

    mask = FIRST[name].clone()
    first = of(mask)
    write(mask, SECOND[name])
    second = of(mask)
    assert torch.equal(second, of(SECOND[name].clone()))
    assert not torch.allclose(second, first)
    write(mask, FIRST[name])
    assert torch.equal(of(mask), first)


@pytest.mark.parametrize("write", WRITES[:2], ids=lambda write: write.__name__)
@pytest.mark.parametrize("backend", ["sdpa", "blocked", "reference"])
@pytest.mark.parametrize("name", FIRST)
def test_backward_of_a_mask_that_was_written_since(
    name: str, backend: str, write: Callable[[Tensor, Tensor], None]
) -> None:
    """The gradient is that of the forward, whose mask was another."""
    gradients = []
    for is_written in (False, True):
        mask, x = FIRST[name].clone(), X.clone().requires_grad_()
        output = hea.attention(x, x, x, Band(4, 4), backend=backend, **{name: mask})  # type: ignore
        if is_written:
            write(mask, SECOND[name])
        output.square().sum().backward()  # type: ignore[union-attr]
        gradients.append(x.grad)
    assert torch.equal(*gradients)


def test_attention_over_a_view() -> None:
    """A mask that is neither contiguous nor first in its memory."""
    memory = torch.zeros(2, 3 * TOKENS, dtype=torch.int64)
    mask = memory[:, 1::3]

    def of(segment_ids: Tensor) -> Tensor:
        return hea.attention(X, X, X, Band(4, 4), segment_ids=segment_ids)  # type: ignore[return-value]

    before = of(mask)
    memory.numpy()[:, 100:] = 1
    assert torch.equal(of(mask), of(mask.clone()))
    assert not torch.allclose(of(mask), before)


def sparsified() -> Any:
    return hea.sparsify(build("llama"), Band(3, 2) | GlobalTokens([0]))


def sparse() -> Any:
    torch.manual_seed(0)
    config = hea.SparseTransformerConfig(
        vocab_size=61, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, attention_pattern=Band(3, 2).to_dict(),
    )  # fmt: skip
    return hea.SparseTransformerModel(config).eval()


def forward(model: Any, ids: Tensor, **options: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids, **options)[0]


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
@pytest.mark.parametrize("make", [sparsified, sparse], ids=lambda make: make.__name__)
def test_padding_of_models(make: Callable[[], Any], write: Callable[[Tensor, Tensor], None]) -> None:
    model, ids = make(), token_ids(2, 20)
    # on the left, where causal queries would read it, and some of the first tokens are global
    first, second = torch.ones(2, 20, dtype=torch.int64), (torch.arange(20).expand(2, -1) >= 8).long()
    mask = first.clone()
    expected = forward(model, ids, attention_mask=mask)
    write(mask, second)
    actual = forward(model, ids, attention_mask=mask)
    assert torch.equal(actual, forward(model, ids, attention_mask=second))
    assert not torch.allclose(actual[:, 8:], expected[:, 8:])


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_packed_positions_of_models(write: Callable[[Tensor, Tensor], None]) -> None:
    model, ids = sparsified(), token_ids(2, 20)
    first, second = torch.arange(20).expand(2, -1), (torch.arange(20) % 7).expand(2, -1)
    positions = first.clone()
    expected = forward(model, ids, position_ids=positions, use_cache=False)
    write(positions, second)
    actual = forward(model, ids, position_ids=positions, use_cache=False)
    assert torch.equal(actual, forward(model, ids, position_ids=second.clone(), use_cache=False))
    assert not torch.allclose(actual, expected)


@pytest.mark.parametrize("backend", ["sdpa", "blocked", "reference"])
def test_patterns_that_are_alike_at_the_length_of_the_row_share_no_mask(backend: str) -> None:
    """They differ in the documents that a mask leaves there, which are shorter."""
    mask = FIRST["key_mask"]
    options = {"key_mask": mask, "backend": backend}
    for position in (-1, TOKENS - 1):
        pattern = Band(2, 2) | GlobalTokens([position])
        expected = hea.attention(X, X, X, pattern, key_mask=mask.clone(), backend="reference")
        torch.testing.assert_close(hea.attention(X, X, X, pattern, **options), expected)
