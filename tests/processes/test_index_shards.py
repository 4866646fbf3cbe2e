"""Models with indexers whose weights are in shards train as whole ones do, or are refused.

Processes (gloo, CPU) run `index_shards_script.py`.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from distributed import run_distributed
from processes.index_shards_script import NAMES, OFTEN, REFUSED

SCRIPT = Path(__file__).parent / "index_shards_script.py"


@pytest.fixture(scope="module")
def report(thorough: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("index_shards")
    run_distributed(SCRIPT, folder, *thorough)
    return json.loads((folder / "0.json").read_text())


@pytest.mark.parametrize(
    "name", [pytest.param(", ".join(each), marks=[pytest.mark.thorough] * (each not in OFTEN)) for each in NAMES]
)
def test_gradients_are_those_of_one_process(report: dict[str, Any], name: str) -> None:
    found, rounding = report[name]
    # the mean of two processes is half of what a sum would be, and a lost loss has no gradient
    assert found < min(2 * rounding, 0.5)


@pytest.mark.parametrize("way", REFUSED)
def test_indexers_in_the_shards_of_their_layers_are_refused(report: dict[str, Any], way: str) -> None:
    assert "FSDP has sharded the indexers of this" in report[way]
    assert "fully_shard(layer.self_attn.indexer)" in report[way]
    assert "LlamaDecoderLayer,LightningIndexer" in report[way]
