"""Train one model of each family by Trainer in the ways that people use on several processes.

    python trainer_script.py FOLDER [thorough]                         one process, batches of 4
    torchrun --nproc_per_node 2 trainer_script.py FOLDER [thorough]    two processes, batches of 2 each

Only one family in every way unless it is thorough. Writes FOLDER/{family}-{way}.pt, the weights, and
FOLDER/report.json, what was run.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from families import FAMILIES
from models_cases import switch_off_dropout, trainer_arguments

STEPS, GLOBAL_BATCH = 3, 4
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
# of every family, the case that stands for it
CASES = {family.name: case for family in FAMILIES for case in family.column("DDP")}
EVALUATED = {
    "eval_strategy": "steps",
    "save_strategy": "steps",
    "eval_steps": 1,
    "save_steps": 1,
    "load_best_model_at_end": True,
    # the loss falls, so that the best is not the last
    "metric_for_best_model": "loss",
    "greater_is_better": True,
}
# arguments of Trainer by name of the way; the last batch of "uneven" has 3 examples
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpointed": {"gradient_checkpointing": True},
    "accumulated": {"gradient_accumulation_steps": 2},
    "uneven": {},
    "best": EVALUATED,
}

# an encoder-decoder, whose batches hold most
IN_EVERY_WAY = ("sparse_seq2seq",)
# the others, unless it is thorough: `sharded_script.py` computes the activations of all of them again
OFTEN = ("plain",)
# which also evaluate, save and resume: buffers that move, spans that are learned
RESUMED = (*IN_EVERY_WAY, "routing_transformer", "adaptive_span")


def build_model(family: str, seed: int) -> Any:
    """Return a model whose weights depend on the seed alone."""
    model = CASES[family].model(seed=seed)
    switch_off_dropout(model)
    return model


def examples(family: str, count: int) -> list[dict[str, list[int]]]:
    """Return texts whose numbers of labels differ, so that a mean of means over processes would be seen."""
    ids = torch.randint(3, 59, (count, 16), generator=torch.Generator().manual_seed(1)).tolist()
    # an encoder-decoder must get as many labels as the longest for every row of a batch
    return [{"input_ids": row, "labels": [-100] * (index % 11) + row[index % 11 :]} for index, row in enumerate(ids)]


def build_trainer(
    family: str, way: str, folder: Path, seed: int = 0, build: Callable[[str, int], Any] = build_model
) -> transformers.Trainer:
    """Return a Trainer of the model that `build` returns once the arguments of Trainer are known."""
    count = {"accumulated": 2 * STEPS * GLOBAL_BATCH, "uneven": STEPS * GLOBAL_BATCH - 1}.get(way, STEPS * GLOBAL_BATCH)
    train = examples(family, count)
    if way == "uneven" and WORLD == 1:
        # with several processes, accelerate fills the last batch with the first examples
        train = [*train, train[0]]
    args = trainer_arguments(
        folder / f"{family}-{way}",
        **{
            "max_steps": STEPS,
            "per_device_train_batch_size": GLOBAL_BATCH // WORLD,
            "per_device_eval_batch_size": GLOBAL_BATCH // WORLD,
            "train_sampling_strategy": "sequential",
            "optim": "sgd",
            "learning_rate": 0.1,
            "lr_scheduler_type": "constant",
            "ddp_backend": "gloo" if WORLD > 1 else None,
            "ddp_find_unused_parameters": False if WORLD > 1 else None,
            "logging_strategy": "no",
            **WAYS[way],
        },
    )
    return transformers.Trainer(
        model=build(family, seed),
        args=args,
        train_dataset=train,
        eval_dataset=train[: 2 * GLOBAL_BATCH],
        data_collator=transformers.default_data_collator,
    )


def train(family: str, way: str, folder: Path) -> dict[str, Any]:
    """Train in one way, and save the weights; return what was run."""
    trainer = build_trainer(family, way, folder)
    trainer.train()
    save(trainer, folder / f"{family}-{way}.pt")
    best = trainer.state.best_model_checkpoint
    return {
        "steps": trainer.state.global_step,
        "processes": trainer.args.world_size,
        "is_checkpointing": trainer.model.is_gradient_checkpointing,
        "finds_unused": getattr(trainer.model_wrapped, "find_unused_parameters", None),
        "best": best and Path(best).name,
    }


def resume(family: str, folder: Path) -> dict[str, Any]:
    """Go on with other weights from the first checkpoint of the way "best", and save the weights of the last."""
    trainer = build_trainer(family, "plain", folder, seed=1)
    trainer.train(resume_from_checkpoint=str(folder / f"{family}-best" / "checkpoint-1"))
    save(trainer, folder / f"{family}-resumed.pt")
    return {"steps": trainer.state.global_step, "processes": trainer.args.world_size}


def save(trainer: transformers.Trainer, path: Path) -> None:
    """Save the weights of the first process."""
    if trainer.is_world_process_zero():
        torch.save(trainer.model.state_dict(), path)


def main(folder: Path, is_thorough: bool) -> None:
    torch.set_num_threads(1)
    report = {}
    for family in CASES:
        torch.save(build_model(family, 0).state_dict(), folder / f"{family}-start.pt")
        ways = WAYS if is_thorough or family in IN_EVERY_WAY else (*OFTEN, *["best"] * (family in RESUMED))
        report |= {f"{family}-{way}": train(family, way, folder) for way in ways}
        if is_thorough or family in RESUMED:
            report[f"{family}-resumed"] = resume(family, folder)
    if RANK == 0:
        (folder / "report.json").write_text(json.dumps(report))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), "thorough" in sys.argv[2:])
