"""The table of neighbours: a run of some tests leaves the cells of the others, one of all tests does not."""

import json
from pathlib import Path
from typing import Any

import capabilities
import pytest

OLD = {"works": True, "refused": []}


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A table with three cells of a family, of which a test has filled one again, and has refused one."""
    file = tmp_path / "neighbours.json"
    file.write_text(json.dumps({"cells": {"sparse_transformer": {"DDP": OLD, "TP": OLD, "ONNX": OLD}}, "versions": {}}))
    monkeypatch.setattr(capabilities, "TABLE", file)
    monkeypatch.setenv(capabilities.VARIABLE, str(tmp_path / "lines"))
    capabilities.capability("sparse_transformer", "DDP")
    capabilities.capability("sparse_transformer", "ONNX", refusal="no")
    return file


def cells(table: Path, is_whole: bool) -> dict[str, Any]:
    capabilities.main(str(table.with_name("lines")), is_whole)
    return json.loads(table.read_text())["cells"]["sparse_transformer"]


def test_some_tests_leave_the_cells_of_others(table: Path) -> None:
    assert cells(table, is_whole=False) == {"DDP": OLD, "TP": OLD, "ONNX": {"works": False, "refused": ["no"]}}


def test_a_whole_run_drops_the_cells_without_a_test(table: Path) -> None:
    assert cells(table, is_whole=True) == {"DDP": OLD, "ONNX": {"works": False, "refused": ["no"]}}
