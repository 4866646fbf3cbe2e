"""Heads that threads compute: the contract of the backend, modes of torch, and processes that are forked."""

import os
import sys
from collections.abc import Iterator

import pytest
import torch
from backends.compared_cases import pairwise_cases, special_cases
from backends_cases import Case, tensors_of
from backends_contract import check, correct_and_rounded

import hf_efficient_attn as hea
from hf_efficient_attn.backends.blocked import backend as blocked
from hf_efficient_attn.backends.blocked import threads
from hf_efficient_attn.patterns import Band

CASES = [case for case in (pairwise_cases() + special_cases())[::18] if min(case.heads) > 1]


@pytest.fixture(autouse=True)
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(threads, "MIN_ELEMENTS", 0)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_contract(case: Case) -> None:
    if blocked.why_not(case.call(values=tensors_of(case, case.dtype).values)) is None:
        # torch's own threads would wait for each other on a busy machine
        torch.set_num_threads(1)
        correct_and_rounded(case)
        torch.set_num_threads(2)
        check(case, blocked)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_modes(mode: type, monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(2, 4, 70, 8)
    monkeypatch.setattr(threads, "MAX_THREADS", 1)
    expected = hea.attention(q, q, q, Band(9, 3), backend="blocked")
    monkeypatch.undo()
    monkeypatch.setattr(threads, "MIN_ELEMENTS", 0)
    with mode():
        found = hea.attention(q, q, q, Band(9, 3), backend="blocked")
    assert torch.equal(found, expected)
    assert torch.get_num_threads() == 2


@pytest.mark.skipif(sys.platform != "linux", reason="needs fork")
def test_fork_after_the_threads_have_started() -> None:
    q = torch.randn(1, 2, 40, 8)
    hea.attention(q, q, q, Band(9, 3), backend="blocked")
    child = os.fork()
    if child == 0:
        # OpenMP's own threads do not survive a fork
        threads._pool(2).submit(int).result(timeout=20)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
