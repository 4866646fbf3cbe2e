"""What the import changes in transformers: listed methods, and nothing that a stock model is or computes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

import hf_efficient_attn as hea
from hf_efficient_attn.integration.replaced import REPLACED

SCRIPT = Path(__file__).with_name("replaced_script.py")
ROOT = str(Path(hea.__file__).parents[1])


def test_the_import_changes_what_is_listed_and_no_stock_model(tmp_path: Path) -> None:
    """By what a process writes before the import, which needs nothing optional, and behind it."""
    folders = {way: tmp_path / way for way in ("without", "with")}
    for folder in folders.values():
        folder.mkdir()
    environment = {**os.environ, "PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, str(SCRIPT), *map(str, folders.values())], check=True, env=environment)
    reports = {way: json.loads((folder / "report.json").read_text()) for way, folder in folders.items()}
    assert reports["without"]["replaced"] == []
    assert reports["with"]["replaced"] == sorted(REPLACED)
    for what in ("attributes", "instances"):
        assert reports["with"][what] == reports["without"][what]
    found, expected = (torch.load(folders[way] / "outputs.pt") for way in ("with", "without"))
    assert found.keys() == expected.keys()
    for name, outputs in expected.items():
        for ours, theirs in zip(found[name], outputs, strict=True):
            assert torch.equal(ours, theirs)
        files, others = (
            {file.name: file.read_bytes() for file in (folders[way] / name).iterdir()} for way in ("with", "without")
        )
        assert files == others
