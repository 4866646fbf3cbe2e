"""Train every family by Trainer under DeepSpeed's ZeRO, save it, and go on from a checkpoint.

    torchrun --nproc_per_node 2 deepspeed_script.py FOLDER

FOLDER/{family} is the model to begin with. Writes FOLDER/{family}-{way}-trained and FOLDER/{family}-{way}-resumed, as
`Trainer.save_model` does, and FOLDER/report.json.
"""

import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import deepspeed
import torch
import transformers
from accelerate import DistributedType, PartialState
from families import FAMILIES, SPARSE
from models_cases import switch_off_dropout
from processes.trainer_script import RANK, WAYS, build_model, build_trainer
from torch import distributed

import hf_efficient_attn as hea
from hf_efficient_attn.models.global_tokens.global_attention import CopiedLinear

STAGES = {"zero-2": 2, "zero-3": 3}
# of every family, the case that ZeRO trains, and the families of which another one is refused
CASES = {family.name: case for family in FAMILIES for case in family.column("ZeRO")}
REFUSED = {family.name: family.refuses["ZeRO"] for family in FAMILIES if "ZeRO" in family.refuses}


def arguments(stage: int) -> dict[str, Any]:
    """Return the arguments of Trainer that turn on ZeRO, in single precision and with a checkpoint after every step."""
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    # shards of small weights, too, which are whole by default
    shards = {"stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": True}
    zero = {"stage": stage, **(shards if stage == 3 else {})}
    config = {"zero_optimization": zero, "zero_allow_untested_optimizer": True, **dict.fromkeys(sizes, "auto")}
    return {"deepspeed": config, "use_cpu": False, "ddp_backend": None, "save_strategy": "steps", "save_steps": 1}


def load(folder: Path, family: str) -> Any:
    """Return a saved model without dropout, whose weights are loaded into shards under ZeRO-3."""
    model = getattr(transformers, CASES[family].main_head).from_pretrained(folder)
    switch_off_dropout(model)
    return model


def train(family: str, way: str, folder: Path) -> dict[str, Any]:
    """Train the saved model, and go on from the last complete checkpoint; return what was run."""
    trainer = build_trainer(family, way, folder, build=lambda family, seed: load(folder / family, family))
    trainer.train()
    trainer.save_model(str(folder / f"{family}-{way}-trained"))
    output = Path(trainer.args.output_dir)
    if RANK == 0:
        # as if it had been killed while it saved the last step
        (output / f"checkpoint-{trainer.state.global_step}" / "latest").unlink()
    distributed.barrier()
    begun = hea.last_complete_checkpoint(output)
    again = build_trainer(family, way, folder, build=lambda family, seed: load(folder / family, family))
    again.train(resume_from_checkpoint=begun)
    again.save_model(str(folder / f"{family}-{way}-resumed"))
    stage = trainer.model_wrapped.zero_optimization_stage()  # type: ignore[union-attr,operator]
    return {"stage": stage, "processes": trainer.args.world_size, "begun": begun and Path(begun).name}


def refusal(family: str, way: str, folder: Path) -> str:
    """Return what is said of the model that other processes train."""
    try:
        build_trainer(family, way, folder).train()
    except hea.EfficientAttentionError as error:
        return str(error)
    return "nothing"


def num_differing(model: Any) -> int:
    """Return how many global projections of a model in shards differ from the local ones, which they start as."""
    assert all(hasattr(parameter, "ds_id") for parameter in model.parameters())
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        copies = [module for module in model.modules() if isinstance(module, CopiedLinear)]
        assert len(copies) == 6
        return sum(not torch.equal(copy.weight, copy.source[0].weight) for copy in copies)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    WAYS.update({way: arguments(stage) for way, stage in STAGES.items()})
    report: dict[str, Any] = {}
    # where DeepSpeed is wanted, accelerate looks for GPUs, and counts one process if there are none: it is told
    with patch.object(PartialState, "_prepare_backend", return_value=("gloo", DistributedType.MULTI_CPU)):
        for way in STAGES:
            report |= {f"{family}-{way}": train(family, way, folder) for family in CASES}
            report |= {f"refused-{family}-{way}": refusal(family, way, folder) for family in REFUSED}
        (case,) = SPARSE.column("ZeRO")
        config = build_model(SPARSE.name, 0).config
        report["differing"] = {
            "built": num_differing(getattr(transformers, case.main_head).from_config(config)),
            "loaded": num_differing(load(folder / SPARSE.name, SPARSE.name)),
            "loaded without them": num_differing(load(folder / "local", SPARSE.name)),
        }
    if RANK == 0:
        (folder / "report.json").write_text(json.dumps(report))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
