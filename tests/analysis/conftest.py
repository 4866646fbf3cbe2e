"""Shared by the tests of pictures and pages."""

import pytest
from analysis.explore_pages import say_backends_at


@pytest.fixture
def few_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pages say backends at two lengths."""
    say_backends_at((512, 1024), monkeypatch)
