"""What a benchmark's clock counts."""

import time

import pytest
import torch

from hf_efficient_attn.bench.harness.report import clock_line
from hf_efficient_attn.bench.harness.timing import Case, clock_of, counts_processor_time, time_within

CPU = torch.device("cpu")


def waits_and_works(_: object) -> None:
    """Wait 0.1 s, as if others had the processor, and compute for a moment."""
    time.sleep(0.1)
    sum(range(1000))


@pytest.mark.parametrize("threads", [1, 2])
def test_a_single_thread_of_a_cpu_counts_its_own_time(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    timing = time_within({"case": Case(waits_and_works)}, 2, 0.0, 16, CPU, clock_of(CPU))["case"]
    assert all((seconds < 0.1) == (threads == 1) for seconds in timing.seconds)
    assert ("processor" in clock_line({"processor_time": counts_processor_time(CPU)})) == (threads == 1)
    assert not counts_processor_time(torch.device("cuda"))
