"""Shared by the tests of benchmarks."""

import subprocess

import pytest
from distributed import run_script


@pytest.fixture
def measured_in_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `peak_memory` measure in forks of what has imported everything."""
    monkeypatch.setattr(subprocess, "run", run_script)
