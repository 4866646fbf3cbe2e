"""Processes that would train different models say so at the first step, and equal ones train."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from distributed import run_distributed
from torch import distributed
from training.unequal_script import IDS, TINY, sparse_llama

import hf_efficient_attn as hea
from hf_efficient_attn.patterns import Band

SCRIPT = Path(__file__).parent / "unequal_script.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where the three processes write what was raised."""
    return tmp_path_factory.mktemp("trainer")


@pytest.fixture(scope="module")
def printed(folder: Path) -> str:
    """Return what three processes print until `Trainer` fails in one of them; rank 2 differs, and comes last."""
    return run_distributed(SCRIPT, folder, world_size=3, exit_code=1)


@pytest.fixture(scope="module")
def raised(printed: str, folder: Path) -> dict[tuple[str, int], str]:
    """Return what was raised, by case and rank."""
    by_rank = {rank: json.loads((folder / f"{rank}.json").read_text()) for rank in range(3)}
    return {(name, rank): message for rank, messages in by_rank.items() for name, message in messages.items()}


def test_equal_processes_train_and_one_may_evaluate_alone(raised: dict[tuple[str, int], str]) -> None:
    for name in ("equal", "equal under DDP", "equal under FSDP", "DDP after a reference"):
        assert [raised[name, rank] for rank in range(3)] == ["nothing"] * 3, name
    assert raised["alone", 0] == "nothing"


@pytest.mark.parametrize(
    ("name", "field", "values"),
    [
        ("pattern", "attention_pattern", ("'left': 4", "'left': 5")),
        ("spans", "span_limit", ("8", "9")),
        ("idle", "attention_pattern", ("'left': 4", "'left': 5")),
        ("DDP", "attention_pattern", ("'left': 4", "'left': 5")),
        ("FSDP", "attention_pattern", ("'left': 4", "'left': 5")),
    ],
)
def test_unequal_processes_name_both_values(
    raised: dict[tuple[str, int], str], name: str, field: str, values: tuple[str, str]
) -> None:
    """Those refuse that differ from the first to train: mostly rank 2, and the others where rank 2 came first."""
    refusals = {rank: raised[name, rank] for rank in range(3) if raised[name, rank] != "nothing"}
    trained_by = (0, 2) if name == "idle" else (0, 1, 2)
    assert [*refusals] in ([2], [*trained_by[:-1]])
    for rank, message in refusals.items():
        found = re.search(rf"{field} is (.+) on rank ([012]) and (.+) on rank {rank}\.", message)
        assert found is not None, message
        first, rank_of_first, own = found.groups()
        assert (rank == 2) != (rank_of_first == "2")
        assert values[int(rank_of_first == "2")] in first
        assert values[int(rank == 2)] in own


def test_trainer_ends_with_the_reason(printed: str) -> None:
    errors = [line for line in printed.splitlines() if "ConfigurationError: The processes train different" in line]
    assert errors
    assert "'left': 4" in errors[0]
    assert "'left': 5" in errors[0]


class Pretended:
    """A process group of which one process exists at a time; counts what is asked of its store."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_processes: int) -> None:
        self.store, self.rank, self.num_asked = distributed.HashStore(), 0, 0
        answers = {"is_initialized": True, "get_world_size": num_processes, "get_backend": "gloo"}
        for name, answer in answers.items():
            monkeypatch.setattr(distributed, name, lambda answer=answer: answer)
        monkeypatch.setattr(distributed, "get_rank", lambda: self.rank)
        monkeypatch.setattr(distributed.distributed_c10d, "_get_default_store", self._ask)

    def _ask(self) -> distributed.Store:
        self.num_asked += 1
        return self.store


def test_any_two_processes_that_train_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever of four comes first, and whoever of the others comes: no two that differ train both."""
    models = {left: sparse_llama(left).train() for left in (4, 5)}
    for one, other in itertools.permutations(range(4), 2):
        group = Pretended(monkeypatch, 4)
        for rank, left in ((one, 4), (other, 5)):
            group.rank = rank
            model: Any = models[left]
            forget(model)
            if rank == one:
                model(input_ids=IDS)
            else:
                with pytest.raises(hea.ConfigurationError, match=f"on rank {one} and .* on rank {other}"):
                    model(input_ids=IDS)


def forget(model: Any) -> None:
    for module in model.modules():
        module.__dict__.pop("_compared_pattern", None)


@pytest.mark.parametrize("use_gradients", [True, False])
def test_a_model_is_compared_once(monkeypatch: pytest.MonkeyPatch, use_gradients: bool) -> None:
    group = Pretended(monkeypatch, 2)
    model = sparse_llama(4).train()
    with torch.set_grad_enabled(use_gradients):
        asked = [model(input_ids=IDS) and group.num_asked for _ in range(3)]
        assert asked == [int(use_gradients)] * 3
        hea.sparsify(model, Band(5, 0))(input_ids=IDS)
    assert group.num_asked == 2 * int(use_gradients)


def test_a_pattern_of_any_size_fits_into_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores take no value above some megabytes."""
    group = Pretended(monkeypatch, 2)
    lengths = []
    set_once = distributed.HashStore.compare_set
    monkeypatch.setattr(
        type(group.store),
        "compare_set",
        lambda store, key, expected, value: (lengths.append(len(key + value)), set_once(store, key, expected, value))[
            1
        ],
    )
    config = transformers.LlamaConfig(**TINY)
    config.attention_pattern = {"kind": "global_tokens", "positions": list(range(3_000))}
    hea.sparsify(transformers.LlamaForCausalLM(config), config.attention_pattern).train()(input_ids=IDS)
    assert max(lengths) < 5_000
