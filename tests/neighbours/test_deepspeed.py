"""DeepSpeed: under ZeRO, Trainer on two processes ends with the weights of one, and goes on from its checkpoints.

Two processes (gloo, CPU) run `deepspeed_script.py` on models that this process saves. Ulysses is tested by
`tests/training/test_sequence_parallel.py`.
"""

import json
import re
from pathlib import Path

import pytest
from distributed import run_distributed
from families import SPARSE
from processes.steps import largest_difference
from processes.trainer_script import STEPS, build_trainer

pytest.importorskip("deepspeed")
from neighbours.deepspeed_script import CASES, REFUSED, STAGES, load

SCRIPT = Path(__file__).parent / "deepspeed_script.py"
# both add the same numbers in another order
TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the models, and with what two processes have made of them."""
    folder = tmp_path_factory.mktemp("deepspeed")
    for family, case in CASES.items():
        case.model().save_pretrained(folder / family)
    sparse = CASES[SPARSE.name].model()
    local = {name: each for name, each in sparse.state_dict().items() if "global" not in name}
    sparse.save_pretrained(folder / "local", state_dict=local)
    run_distributed(SCRIPT, folder)
    return folder


@pytest.mark.parametrize("way", STAGES)
@pytest.mark.parametrize("family", CASES)
def test_two_processes_end_with_the_weights_of_one(folder: Path, family: str, way: str, tmp_path: Path) -> None:
    trainer = build_trainer(family, "plain", tmp_path, build=lambda family, seed: load(folder / family, family))
    trainer.train()
    begun, alone, together, resumed = (
        model.state_dict()
        for model in (
            load(folder / family, family),
            trainer.model,
            *(load(folder / f"{family}-{way}-{what}", family) for what in ("trained", "resumed")),
        )
    )
    assert largest_difference(begun, alone) > 1000 * TOLERANCE
    assert largest_difference(alone, together) <= TOLERANCE
    assert largest_difference(together, resumed) <= TOLERANCE
    said = json.loads((folder / "report.json").read_text())[f"{family}-{way}"]
    assert said == {"stage": STAGES[way], "processes": 2, "begun": f"checkpoint-{STEPS - 1}"}


@pytest.mark.parametrize("way", STAGES)
@pytest.mark.parametrize("family", REFUSED)
def test_what_zero_would_train_wrongly_is_refused(folder: Path, family: str, way: str) -> None:
    """Its optimizer trains numbers of its own in place of learned spans, which nobody clamps."""
    said = json.loads((folder / "report.json").read_text())[f"refused-{family}-{way}"]
    assert re.match(REFUSED[family], said)


def test_global_projections_start_as_copies_in_shards(folder: Path) -> None:
    """DeepSpeed gathers a map for its start values, but not the map of which it is a copy."""
    differing = json.loads((folder / "report.json").read_text())["differing"]
    assert differing == {"built": 0, "loaded": 6, "loaded without them": 0}
