"""Transformers' own tests of models, on every family: tests/transformers_suite.py."""

import sys
from pathlib import Path

import pytest
import transformers_suite
from distributed import run_fresh


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the tests of the installed version."""
    folder = tmp_path_factory.mktemp("suite")
    transformers_suite.download(folder)
    return folder


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", [family["name"] for family in transformers_suite.FAMILIES])
def test_own_tests_of_transformers(family: str, folder: Path) -> None:
    pytest.importorskip("parameterized")
    words = [sys.executable, transformers_suite.__file__, "--folder", folder, "--family", family]
    done = run_fresh(words, timeout=1800)
    assert done.returncode == 0, done.stdout[-5000:]
