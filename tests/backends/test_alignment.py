"""Which tensors the kernel of GPUs can read as they are."""

import torch

from hf_efficient_attn.backends.kernels import aligned, is_aligned

PLAIN = torch.randn(2, 4, 9, 16)
WIDER = torch.randn(2, 4, 9, 17)


def test_rows_start_at_multiples_of_a_load() -> None:
    assert is_aligned(PLAIN)
    assert is_aligned(PLAIN.transpose(1, 2))
    assert is_aligned(PLAIN[:, :, :1].expand(2, 4, 9, 16))
    # rows of other lengths, the second number first, numbers that are not neighbours
    assert not is_aligned(WIDER[..., :16])
    assert not is_aligned(PLAIN.flatten()[1:17].view(1, 1, 1, 16))
    assert not is_aligned(PLAIN.transpose(2, 3))


def test_others_are_copied() -> None:
    same, copied = aligned(PLAIN, WIDER[..., :16])
    assert same is PLAIN
    assert is_aligned(copied)
    assert torch.equal(copied, WIDER[..., :16])
