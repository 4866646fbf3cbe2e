"""Counts of tiles: asked of a device once, and again of tensors that have changed."""

import torch
from pretended_cuda import on_cuda, pretended_cuda

from hf_efficient_attn.layout.selected_keys import counted_once


def test_changed_tensors_are_counted_anew() -> None:
    with pretended_cuda() as waits:
        blocks = on_cuda(torch.tensor([1, 2]))
        assert [counted_once((blocks, None), "key", blocks * 2) for _ in range(2)] == [[2, 4]] * 2
        assert waits.total() == 1
        assert counted_once((blocks, None), "other key", blocks * 3) == [3, 6]
        blocks.add_(1)
        assert counted_once((blocks, None), "key", blocks * 2) == [4, 6]
    assert waits.total() == 3
