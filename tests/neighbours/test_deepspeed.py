"""DeepSpeed: under ZeRO, Trainer on two processes ends with the weights of one, and goes on from its checkpoints.

Two processes (gloo, CPU) run `deepspeed_script.py` on models that this process saves. Ulysses is tested by
`tests/training/test_sequence_parallel.py`.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from processes.steps import ALL_CASES, largest_difference
from processes.trainer_script import FAMILIES, STEPS, build_model, build_trainer
from torchrun import run_together

pytest.importorskip("deepspeed")
from neighbours.deepspeed_script import STAGES, load

SCRIPT = Path(__file__).parent / "deepspeed_script.py"
# both add the same numbers in another order
TOLERANCE = 1e-6


def start(family: str) -> Any:
    """Return the model to begin with; learned spans are refused, those that every token chooses are not."""
    return ALL_CASES["span-modern-dynamic"].model(seed=0) if family == "adaptive_span" else build_model(family, 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the models, and with what two processes have made of them."""
    folder = tmp_path_factory.mktemp("deepspeed")
    for family in FAMILIES:
        start(family).save_pretrained(folder / family)
    sparse = start("sparse_transformer")
    local = {name: each for name, each in sparse.state_dict().items() if "global" not in name}
    sparse.save_pretrained(folder / "local", state_dict=local)
    run_together(SCRIPT, folder)
    return folder


@pytest.mark.parametrize("way", STAGES)
@pytest.mark.parametrize("family", FAMILIES)
def test_two_processes_end_with_the_weights_of_one(
    folder: Path, family: str, way: str, tmp_path: Path, capability: Any
) -> None:
    trainer = build_trainer(family, "plain", tmp_path, build=lambda family, seed: load(folder / family))
    trainer.train()
    begun, alone, together, resumed = (
        model.state_dict()
        for model in (
            load(folder / family),
            trainer.model,
            *(load(folder / f"{family}-{way}-{what}") for what in ("trained", "resumed")),
        )
    )
    assert largest_difference(begun, alone) > 1000 * TOLERANCE
    assert largest_difference(alone, together) <= TOLERANCE
    assert largest_difference(together, resumed) <= TOLERANCE
    said = json.loads((folder / "report.json").read_text())[f"{family}-{way}"]
    assert said == {"stage": STAGES[way], "processes": 2, "begun": f"checkpoint-{STEPS - 1}"}
    capability("sparsified" if family == "llama" else family, "ZeRO")


@pytest.mark.parametrize("way", STAGES)
def test_learned_spans_are_refused(folder: Path, way: str, capability: Any) -> None:
    """Its optimizer trains numbers of its own, which nobody clamps."""
    said = json.loads((folder / "report.json").read_text())[f"refused-{way}"]
    assert said.startswith("DeepSpeed's ZeRO trains numbers of its own in place of learned spans")
    capability("adaptive_span", "ZeRO", refusal=said)


def test_global_projections_start_as_copies_in_shards(folder: Path) -> None:
    """DeepSpeed gathers a map for its start values, but not the map of which it is a copy."""
    differing = json.loads((folder / "report.json").read_text())["differing"]
    assert differing == {"built": 0, "loaded": 6, "loaded without them": 0}
