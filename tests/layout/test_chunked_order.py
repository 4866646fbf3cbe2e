"""Chunks that are listed for each chunk, against the circle."""

import torch

import hf_efficient_attn as hea
from hf_efficient_attn.patterns import Full


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
