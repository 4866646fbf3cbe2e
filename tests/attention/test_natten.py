"""Grids with shifted borders against NATTEN's definition."""

import pytest
import torch
from torch import Tensor

import hf_efficient_attn as hea
from hf_efficient_attn.patterns import Dilated, Grid


def neighbourhood_attention(q: Tensor, k: Tensor, v: Tensor, kernel_size: int, dilation: int) -> Tensor:
    """Return neighbourhood attention of [batch, heads, height, width, head_dim] (Hassani et al., 2023, equations 2-5).

    Along every axis a query has `kernel_size` neighbours: of the tokens that lie a multiple of `dilation` away, those
    nearest to it, as many on either side as long as there are enough.
    """

    def neighbours(size: int, query: int) -> list[int]:
        near = sorted(range(query % dilation, size, dilation), key=lambda key: (abs(key - query), key))
        return sorted(near[:kernel_size])

    out = torch.empty_like(q)
    for row in range(q.shape[2]):
        for column in range(q.shape[3]):
            rows, columns = neighbours(q.shape[2], row), neighbours(q.shape[3], column)
            keys, values = (each[:, :, rows][:, :, :, columns].flatten(2, 3) for each in (k, v))
            scores = (keys @ q[:, :, row, column, :, None])[..., 0] * q.shape[-1] ** -0.5
            out[:, :, row, column] = (scores.softmax(-1)[:, :, None] @ values)[:, :, 0]
    return out


@pytest.mark.parametrize(("kernel_size", "dilation"), [(3, 1), (7, 1), (3, 3), (5, 2)])
def test_shifted_borders_are_natten(kernel_size: int, dilation: int) -> None:
    height, width = 14, 11
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, 2, height, width, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    reach = kernel_size // 2 * dilation
    axis = Dilated(reach, reach, dilation)
    pattern = Grid([height, width], [axis, axis], borders="shifted")
    found = hea.attention(*(each.flatten(2, 3) for each in (q, k, v)), pattern, backend="blocked")
    assert isinstance(found, Tensor)
    torch.testing.assert_close(
        found.unflatten(2, (height, width)), neighbourhood_attention(q, k, v, kernel_size, dilation)
    )
