"""Chunks that are listed for each chunk, against the circle; keys of length 1, against those that were made before."""

from dataclasses import replace

import pytest
import torch

import hf_efficient_attn as hea
from hf_efficient_attn.patterns import Causal, Full


def test_listed_chunks_are_read_instead_of_the_circle() -> None:
    generator = torch.Generator().manual_seed(0)
    q, v = torch.randn(2, 2, 3, 12, 8, generator=generator, dtype=torch.float64)
    order = torch.randn(2, 3, 2, 12, generator=generator).argsort(-1)
    number = torch.arange(6)
    for numbers in ([-1, 0], [0]):
        reads = torch.stack([(number + step) % 6 for step in numbers], -1)[None, None]
        circle = hea.ChunkedOrder(order, 4, chunks_before=len(numbers) - 1)
        expected = hea.attention(q, q, v, Full(), chosen=circle)
        actual = hea.attention(q, q, v, Full(), chosen=hea.ChunkedOrder(order, 4, reads=reads))
        torch.testing.assert_close(actual, expected)
    alone = hea.attention(q, q, v, Full(), chosen=hea.ChunkedOrder(order, 4, reads=torch.full((1, 1, 6, 1), -1)))
    assert not alone.any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options", [{}, {"chunks_after": 1}, {"chunks_before": 2}, {"counts_duplicates": False}, {"chunk_tokens": 40}]
)
def test_queries_are_read_as_keys_of_length_one(options: dict[str, int | bool], dtype: torch.dtype) -> None:
    """Output and gradients are those of keys that were made before, in one round and in several, with padding."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(2, 2, 3, 35, 8, generator=generator).to(dtype)
    key_mask = torch.arange(35) < torch.tensor([[35], [29]])
    for rounds in (1, 2):
        order = torch.randn(2, 3, rounds, 35, generator=generator).argsort(-1)
        chosen = hea.ChunkedOrder(order, **{"chunk_tokens": 4, **options}, unit_keys=True)

        def step(
            states: torch.Tensor, backend: str, chosen: hea.ChunkedOrder, is_shared: bool
        ) -> tuple[torch.Tensor, ...]:
            q, v = (each.detach().requires_grad_() for each in states)
            k = q if is_shared else q / (q.square().sum(-1, keepdim=True) + 8e-6).sqrt()
            out = hea.attention(q, k, v, Causal(), key_mask=key_mask, chosen=chosen, backend=backend)
            return out, *torch.autograd.grad(out, (q, v), torch.ones_like(out) + v.detach())

        before = step(drawn.double(), "reference", replace(chosen, unit_keys=False), False)
        for backend in ("reference", "gathered"):
            found = step(drawn, backend, chosen, True)
            for actual, expected in zip(found, before, strict=True):
                error = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
                torch.testing.assert_close(actual.double(), expected, atol=error, rtol=error)


def test_keys_that_are_no_queries_are_read_at_length_one() -> None:
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 1, 2, 30, 8, generator=generator, dtype=torch.float64)
    q = torch.randn(1, 2, 3, 8, generator=generator, dtype=torch.float64)
    order = torch.randn(1, 2, 1, 30, generator=generator).argsort(-1)
    unit = k / (k.square().sum(-1, keepdim=True) + 8e-6).sqrt()
    expected = hea.attention(q, unit, v, Causal(), chosen=hea.ChunkedOrder(order, 4), backend="reference")
    for backend in ("reference", "gathered"):
        chosen = hea.ChunkedOrder(order, 4, unit_keys=True)
        torch.testing.assert_close(hea.attention(q, k, v, Causal(), chosen=chosen, backend=backend), expected)
