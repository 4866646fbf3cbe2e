"""What a benchmark's clock counts."""

import time

import pytest
import torch

from hf_efficient_attn.bench.harness.report import clock_line
from hf_efficient_attn.bench.harness.timing import clock_of, counts_processor_time

CPU = torch.device("cpu")


@pytest.mark.parametrize("threads", [1, 2])
def test_a_single_thread_of_a_cpu_counts_its_own_time(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert clock_of(CPU) is (time.process_time if threads == 1 else time.perf_counter)
    assert ("processor" in clock_line({"processor_time": counts_processor_time(CPU)})) == (threads == 1)
    assert not counts_processor_time(torch.device("cuda"))
