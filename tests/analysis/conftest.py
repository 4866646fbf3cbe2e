"""Shared by the tests of pictures and pages."""

import pytest


@pytest.fixture
def few_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pages say backends at two lengths; one in test_explore_patterns.py says them at all, which takes seconds."""
    for module in ("explore", "explore_patterns"):
        monkeypatch.setattr(f"hf_efficient_attn.analysis.{module}.LENGTHS", (512, 1024))
