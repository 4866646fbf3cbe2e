"""Train models whose weights are in shards (FSDP2), and save and load the shards.

    torchrun --nproc_per_node 2 sharded_script.py FOLDER train [thorough]
    torchrun --nproc_per_node 3 sharded_script.py FOLDER load
    python sharded_script.py FOLDER load

FOLDER has a folder for each case with the saved model. Training by transformers' own FSDP2 writes its shards and, in
files, its weights to FOLDER/trained; accelerate's FSDP2 trains the same. Writes FOLDER/report-{processes}.json.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from families import FAMILIES
from models_cases import checkpoint_activations, switch_off_dropout
from processes.steps import (
    LEARNING_RATE,
    Alone,
    batch_of,
    build,
    largest_difference,
    train,
    train_alone,
    weights_of,
)
from shared_meshes import share_meshes
from torch import distributed
from transformers.distributed import DistributedConfig

# by whom all are trained, and computed again, unless it is thorough
OFTEN = ("transformers", True)
# what accelerate trains, too: one with buffers, an encoder-decoder, one of theirs
BY_ACCELERATE = ("routing-causal", "seq2seq-led", "llama")
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
# accelerate 1.15 cannot cut any BERT into shards: its embeddings and its last bias have two owners each
NOT_BY_ACCELERATE = ("bert",)
CASES = {case.name: case for family in FAMILIES for case in family.column("FSDP2")}


def load(case: Any, folder: Path) -> Any:
    """Return a saved model, in shards if there are several processes, ready for training without dropout."""
    options = {"distributed_config": DistributedConfig(fsdp_size=WORLD)} if WORLD > 1 else {}
    model = getattr(transformers, case.main_head).from_pretrained(folder, **options).train()
    switch_off_dropout(model)
    return model


def train_shards(case: Any, folder: Path, is_checkpointed: bool) -> Any:
    """Return the trained model, loaded in shards by transformers."""
    model = load(case, folder)
    if is_checkpointed:
        checkpoint_activations(model)
    train(model, lambda step: [batch_of(case, case.main_head, step, RANK, WORLD)])
    return model


def train_with_accelerate(case: Any, _: Path, activation_checkpointing: bool) -> Any:
    """Return the trained model, cut into shards by accelerate, which offers this on GPUs only: here it is told so."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        activation_checkpointing=activation_checkpointing,
        # accelerate 1.15 cannot read saved buffers so, which it takes for shards
        cpu_ram_efficient_loading=not hasattr(case.config_class, "num_clusters"),
    )
    accelerator = Accelerator(cpu=True)
    told = {"distributed_type": DistributedType.FSDP, "fsdp_plugin": plugin}
    with patch.dict(AcceleratorState._shared_state, told):
        model = build(case, case.main_head)
        # as Trainer does: a layer that is computed again would append to the cache again
        model.config.use_cache = False
        optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
        model, optimizer = accelerator.prepare(model, optimizer)
        train(model, lambda step: [batch_of(case, case.main_head, step, RANK, WORLD)], optimizer)
    return model


def ways_of(name: str) -> list[tuple[str, bool]]:
    """Return by what a case is trained, and whether its activations are computed again."""
    trainers = ("transformers", "accelerate")[: 1 if name in NOT_BY_ACCELERATE else 2]
    return [(by, is_checkpointed) for by in trainers for is_checkpointed in (False, True)]


def is_often(name: str, way: tuple[str, bool]) -> bool:
    """Return whether a case is trained so unless it is thorough."""
    return way == OFTEN or (way == ("accelerate", False) and name in BY_ACCELERATE)


def way_name(by: str, is_checkpointed: bool) -> str:
    return f"{by}{' checkpointed' * is_checkpointed}"


def train_all(folder: Path, is_thorough: bool) -> dict[str, Any]:
    """Train every case in every way, and save one in shards and whole; return the differences to one process."""
    report: dict[str, Any] = {}
    # before the processes know each other: models that one trains alone would count as different from the others'
    alone = {name: train_alone(case, case.main_head, WORLD) for name, case in CASES.items() if RANK == 0}
    distributed.init_process_group("gloo")
    for name, case in CASES.items():
        one = alone.get(name, Alone({}, 0.0, 0.0))
        report[name] = {"moved": one.moved, "apart": one.apart}
        for by, is_checkpointed in (way for way in ways_of(name) if is_thorough or is_often(name, way)):
            train_one = {"transformers": train_shards, "accelerate": train_with_accelerate}[by]
            trained = train_one(case, folder / name, is_checkpointed)
            way = way_name(by, is_checkpointed)
            together = weights_of(trained)
            report[name][way] = largest_difference(one.weights or together, together)
            report[name][f"{way}, whole parameters"] = whole_parameters(trained)
            if by == "transformers":
                trained.save_pretrained(folder / "shards" / name, distributed_checkpoint=True)
                trained.save_pretrained(folder / "whole" / name, is_main_process=RANK == 0)
    return report


def whole_parameters(model: Any) -> list[str]:
    """Return the names of the parameters that are in no shards."""
    return [name for name, each in model.named_parameters() if not hasattr(each, "full_tensor")]


def load_all(folder: Path) -> dict[str, Any]:
    """Load what was trained from its shards, and whole; return the differences to what was saved whole."""
    report = {}
    for name, case in CASES.items():
        loaded = {kind: weights_of(load(case, folder / kind / name)) for kind in ("shards", "whole")}
        if RANK == 0:
            whole = weights_of(getattr(transformers, case.main_head).from_pretrained(folder / "whole" / name))
            report[name] = {kind: largest_difference(whole, found) for kind, found in loaded.items()}
    return report


def main(folder: Path, what: str, is_thorough: bool) -> None:
    torch.set_num_threads(1)
    share_meshes()
    report = load_all(folder) if what == "load" else train_all(folder, is_thorough)
    if RANK == 0:
        (folder / f"report-{what}-{WORLD}.json").write_text(json.dumps(report))
    if distributed.is_initialized():
        distributed.barrier()
        distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], "thorough" in sys.argv)
