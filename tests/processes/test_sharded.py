"""Models whose weights are in shards train as whole ones do, and their checkpoints are read by any number of processes.

Processes (gloo, CPU) run `sharded_script.py` on models that this process saves.
"""

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_distributed
from families import BY_NAME
from processes.sharded_script import CASES, is_often, way_name, ways_of
from processes.steps import build
from training.tiny_models import sparse_llama

import hf_efficient_attn as hea
from hf_efficient_attn.integration.unsupported import refuse_uneven_vocabulary

SCRIPT = Path(__file__).parent / "sharded_script.py"
# both add the same numbers in another order
TOLERANCE = 1e-6
WAYS = [
    pytest.param(name, way_name(*way), marks=() if is_often(name, way) else pytest.mark.thorough)
    for name in CASES
    for way in ways_of(name)
]

Report = Callable[[str, int], dict[str, Any]]


@pytest.fixture(scope="module")
def report(thorough: list[str], tmp_path_factory: pytest.TempPathFactory) -> Report:
    """What two processes found when they trained, and what three, or thorough one, too, found when they loaded it."""
    folder = tmp_path_factory.mktemp("sharded")
    for name, case in CASES.items():
        build(case, case.main_head).save_pretrained(folder / name)
    run_distributed(SCRIPT, folder, "train", *thorough)
    for processes in (1, 3) if thorough else (3,):
        run_distributed(SCRIPT, folder, "load", world_size=processes)
    return lambda what, processes: json.loads((folder / f"report-{what}-{processes}.json").read_text())


@pytest.mark.parametrize(("name", "way"), WAYS)
def test_shards_are_trained_as_one_process_trains(report: Report, name: str, way: str) -> None:
    found = report("train", 2)[name]
    assert found["moved"] > 1000 * TOLERANCE
    # else processes that are told nothing by the others would pass, too
    assert found["apart"] > 1000 * TOLERANCE
    assert found[f"{way}, whole parameters"] == []
    assert found[way] <= TOLERANCE


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.thorough), 3])
@pytest.mark.parametrize("name", CASES)
def test_shards_of_two_processes_are_loaded_by_any_number(report: Report, name: str, processes: int) -> None:
    assert report("load", processes)[name] == {"shards": 0.0, "whole": 0.0}


def of_family(vocab_size: int) -> Any:
    model = BY_NAME["simplified-sas"].model(vocab_size=vocab_size)
    model.register_forward_pre_hook(refuse_uneven_vocabulary)
    return model


def sparsified(vocab_size: int) -> Any:
    return sparse_llama(vocab_size=vocab_size, tie_word_embeddings=True)


@pytest.mark.parametrize("make", [of_family, sparsified])
def test_a_tied_vocabulary_that_processes_cannot_divide_is_not_trained(make: Callable[[int], Any]) -> None:
    """Transformers would go on with old weights, without a word: a Llama as well."""
    ids = torch.ones(1, 4, dtype=torch.long)
    for vocab_size in (66, 67):
        model = make(vocab_size).eval()
        # what transformers notes in a model that it has cut into shards
        model._fsdp_size = 2
        model(ids)
        model.train()
        with (
            pytest.raises(hea.UnsupportedBackendError, match="does not divide the 67")
            if vocab_size == 67
            else nullcontext()
        ):
            model(ids)
