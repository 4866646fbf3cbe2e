"""Run an example in shards (FSDP2) on CPUs, where accelerate silently makes DDP of that.

    torchrun --nproc_per_node 2 fsdp_on_cpus.py FOLDER EXAMPLE ARGUMENT...

The variables of `accelerate launch --config_file examples/launch/fsdp.yaml` are expected. Each process writes
FOLDER/shards_{rank}.json: how many parameters are in shards, whether the optimizer holds these very parameters, and how
far a weight has moved.
"""

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from accelerate import DistributedType
from accelerate.state import AcceleratorState

EXAMPLES = Path(__file__).parents[2] / "examples"
FOLDER, RANK = Path(sys.argv[1]), os.environ["RANK"]
make_state, train = AcceleratorState.__init__, transformers.Trainer.train


def make_state_of_shards(state: Any, *arguments: Any, fsdp_plugin: Any = None, **options: Any) -> None:
    """As on GPUs."""
    plugin = fsdp_plugin or AcceleratorState._shared_state.get("fsdp_plugin")
    make_state(state, *arguments, fsdp_plugin=fsdp_plugin, **options)
    if plugin is not None:
        state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, plugin


def train_and_report(trainer: Any, *arguments: Any, **options: Any) -> Any:
    """Train, and write what is said above."""
    before = {name: each.detach().clone() for name, each in trainer.model.named_parameters()}
    done = train(trainer, *arguments, **options)
    after = dict(trainer.model_wrapped.named_parameters())
    held = {id(each) for group in trainer.optimizer.param_groups for each in group["params"]}
    whole = {name.replace("_checkpoint_wrapped_module.", ""): each.full_tensor() for name, each in after.items()}
    report = {
        "in_shards": [type(each).__name__ for each in after.values()],
        "is_held": [id(each) in held for each in after.values()],
        "moved": [float((before[name] - each.detach()).abs().max()) for name, each in whole.items()],
        "decays": sorted({group["weight_decay"] for group in trainer.optimizer.param_groups}),
    }
    (FOLDER / f"shards_{RANK}.json").write_text(json.dumps(report))
    return done


def main() -> None:
    script = EXAMPLES / sys.argv[2]
    sys.path.insert(0, str(EXAMPLES))
    with (
        patch.object(AcceleratorState, "__init__", make_state_of_shards),
        patch.object(transformers.Trainer, "train", train_and_report),
        patch.object(sys, "argv", [str(script), *sys.argv[3:]]),
    ):
        runpy.run_path(str(script), run_name="__main__")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
