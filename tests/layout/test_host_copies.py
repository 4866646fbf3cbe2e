"""Copies on the host: one for several tensors, none for what is known, another where a tensor was changed."""

import torch
from pretended_cuda import on_cuda, pretended_cuda

from hf_efficient_attn.layout.transfer import derived, on_host, prefetch_to_host

GIVEN = [
    torch.tensor([[1, 0, 2**40]]),
    torch.tensor([True, False, True]),
    torch.tensor(0.1),
    torch.zeros(2, 0),
    torch.arange(12, dtype=torch.int32).view(3, 4)[:, ::2],
    torch.tensor([3.0], dtype=torch.float64),
]


def test_several_tensors_are_one_copy() -> None:
    with pretended_cuda() as waits:
        tensors = [on_cuda(each) for each in GIVEN]
        prefetch_to_host(None, "other", *tensors, tensors[0])
        copies = [on_host(each) for each in tensors]
        prefetch_to_host(*tensors)
    assert waits.total() == 1
    for copy, given in zip(copies, GIVEN, strict=True):
        assert type(copy) is torch.Tensor
        assert copy.dtype == given.dtype
        assert torch.equal(copy, given)


def test_what_is_made_of_known_tensors_is_known() -> None:
    with pretended_cuda() as waits:
        first, second = on_cuda(torch.tensor([1, 2])), on_cuda(torch.tensor([3, 4]))
        prefetch_to_host(first)
        double = derived(lambda tensor: 2 * tensor, first)
        assert on_host(double).tolist() == [2, 4]
        assert waits.total() == 1
        # of this one nobody knows the other part
        total = derived(lambda left, right: left + right, double, second)
        assert waits.total() == 1
        assert on_host(total).tolist() == [5, 8]
    assert waits.total() == 2


def test_a_changed_tensor_is_another() -> None:
    with pretended_cuda():
        mask = on_cuda(torch.tensor([1, 1]))
        assert on_host(mask).tolist() == [1, 1]
        mask.mul_(0)
        assert on_host(mask).tolist() == [0, 0]


def test_nothing_is_copied_on_the_host() -> None:
    mask = torch.tensor([1, 0])
    assert on_host(mask) is mask
