"""Shared by the tests of benchmarks."""

import subprocess
from functools import partial

import pytest
from forked import run_forked, server


@pytest.fixture
def measured_in_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `peak_memory` measure in forks of what has imported everything."""
    monkeypatch.setattr(subprocess, "run", partial(run_forked, server(), subprocess.run))
