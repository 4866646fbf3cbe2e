"""What the import changes in transformers: listed methods, and nothing that a stock model is or computes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_efficient_attn as hea
from hf_efficient_attn.integration.replaced import REPLACED

SCRIPT = Path(__file__).with_name("replaced_script.py")
ROOT = str(Path(hea.__file__).parents[1])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return what a process wrote before the import and behind it."""
    found = {way: tmp_path_factory.mktemp(way) for way in ("without", "with")}
    environment = {**os.environ, "PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, str(SCRIPT), *map(str, found.values())], check=True, env=environment)
    return found


@pytest.fixture(scope="module")
def reports(folders: dict[str, Path]) -> dict[str, Any]:
    return {way: json.loads((folder / "report.json").read_text()) for way, folder in folders.items()}


def test_what_is_replaced_is_listed(reports: dict[str, Any]) -> None:
    assert reports["without"]["replaced"] == []
    assert reports["with"]["replaced"] == sorted(REPLACED)


@pytest.mark.parametrize("what", ["attributes", "instances"])
def test_classes_and_stock_models_have_the_attributes_that_they_had(reports: dict[str, Any], what: str) -> None:
    assert reports["with"][what] == reports["without"][what]


def test_stock_models_compute_and_save_the_same(folders: dict[str, Path]) -> None:
    found, expected = (torch.load(folders[way] / "outputs.pt") for way in ("with", "without"))
    assert found.keys() == expected.keys()
    for name, outputs in expected.items():
        for ours, theirs in zip(found[name], outputs, strict=True):
            assert torch.equal(ours, theirs)
        files, others = (
            {file.name: file.read_bytes() for file in (folders[way] / name).iterdir()} for way in ("with", "without")
        )
        assert files == others
