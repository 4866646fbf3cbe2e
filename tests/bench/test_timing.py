"""What a benchmark's clock counts, and cases in a process of their own: they run and keep their state there."""

import os
import time
from pathlib import Path

import pytest
import torch

from hf_efficient_attn.bench.report import clock_line
from hf_efficient_attn.bench.timing import Case, cases_apart, clock_of, counts_processor_time

CPU = torch.device("cpu")


@pytest.mark.parametrize("threads", [1, 2])
def test_a_single_thread_of_a_cpu_counts_its_own_time(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert clock_of(CPU) is (time.process_time if threads == 1 else time.perf_counter)
    assert ("processor" in clock_line({"processor_time": counts_processor_time(CPU)})) == (threads == 1)
    assert not counts_processor_time(torch.device("cuda"))


def build(folder: str) -> dict[str, Case]:
    """Return cases that write down who prepares and who runs them, and with which state."""
    path = Path(folder) / "log"

    def fail(state: object) -> None:
        raise ZeroDivisionError("of this case")

    def write(state: object) -> None:
        with path.open("a") as file:
            file.write(f"{os.getpid()} {state} {torch.get_num_threads()}\n")

    return {"write": Case(write, lambda: "state"), "fail": Case(fail), "end": Case(lambda _: os._exit(1))}


def build_nothing() -> dict[str, Case]:
    raise RuntimeError("no case today")


def test_cases_run_in_one_other_process(tmp_path: Path) -> None:
    with cases_apart(build, (str(tmp_path),), CPU) as cases:
        for _ in range(2):
            cases["write"].run(cases["write"].prepare())
        with pytest.raises(RuntimeError, match="ZeroDivisionError: of this case"):
            cases["fail"].run(cases["fail"].prepare())
        cases["write"].run(cases["write"].prepare())
        with pytest.raises(RuntimeError, match="ended early"):
            cases["end"].run(cases["end"].prepare())
    lines = (tmp_path / "log").read_text().splitlines()
    assert len(lines) == 3
    assert len(set(lines)) == 1
    process, state, num_threads = lines[0].split()
    assert int(process) != os.getpid()
    assert (state, int(num_threads)) == ("state", torch.get_num_threads())


def test_a_case_that_cannot_be_built() -> None:
    with pytest.raises(RuntimeError, match="no case today"), cases_apart(build_nothing, (), CPU):
        pass
