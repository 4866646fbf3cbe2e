"""Tensors that are sent to a device: by one copy, equal, and sharing memory as before."""

import torch
from pretended_cuda import CUDA, pretended_cuda, unwrap

from hf_efficient_attn.layout.transfer import send, tables_on
from hf_efficient_attn.patterns import RandomBlocks

SHEET = torch.arange(24, dtype=torch.float32).view(4, 6)
SENT = [
    torch.tensor([True, False, True]),
    SHEET,
    None,
    SHEET[1:, 2:5],
    torch.tensor([[2**40], [3]]),
    torch.zeros(2, 0),
    SHEET[:1].expand(3, 6),
    torch.tensor(0.1, dtype=torch.bfloat16),
    torch.arange(6, dtype=torch.int32).view(2, 3).t(),
]


def test_many_tensors_are_one_copy() -> None:
    with pretended_cuda() as waits:
        found = send(SENT, CUDA)
        assert waits.total() == 1
        assert send([], CUDA) == []
        assert send([None], CUDA) == [None]
        assert waits.total() == 1
    for sent, given in zip(found, SENT, strict=True):
        if given is None:
            assert sent is None
            continue
        assert sent.device == CUDA
        assert (sent.dtype, sent.shape, sent.stride()) == (given.dtype, given.shape, given.stride())
        assert torch.equal(unwrap(sent), given)


def test_what_shared_memory_shares_it() -> None:
    with pretended_cuda():
        sheet, part = send([SHEET, SHEET[1:, 2:5]], CUDA)
        sheet.zero_()
    assert not unwrap(part).any()
    assert SHEET.any()


def test_on_the_cpu_nothing_is_copied() -> None:
    assert send([SHEET, None], torch.device("cpu")) == [SHEET, None]


def test_all_tables_of_patterns_are_one_copy() -> None:
    patterns = [RandomBlocks(2, 4, seed).resolve(40) for seed in (0, 1)]
    queries, keys = torch.arange(40)[:, None], torch.arange(40)
    with pretended_cuda() as waits:
        found = tables_on(patterns, CUDA)
        assert waits.total() == 1
        allowed = [pattern.allowed(*send((queries, keys), CUDA)) for pattern in found]
    for pattern, own, on_cpu in zip(patterns, allowed, tables_on(patterns, torch.device("cpu")), strict=True):
        expected = [[bool(pattern.allowed(query, key)) for key in range(40)] for query in range(40)]
        assert unwrap(own).tolist() == expected == on_cpu.allowed(queries, keys).tolist()
