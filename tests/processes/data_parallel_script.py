"""Train every head of every family in DistributedDataParallel, and in one process; write how far weights are apart.

    torchrun --nproc_per_node 2 data_parallel_script.py FOLDER [thorough]

Only the main heads unless it is thorough. Writes FOLDER/report.json: by case, head and way of training, the largest
difference, or the error; and how far a weight moves, and is from that of a process that hears nothing of the others.
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from families import BY_NAME, one_each
from models_cases import checkpoint_activations
from processes.steps import Alone, batch_of, build, largest_difference, train, train_alone, weights_of
from torch import distributed
from torch.nn.parallel import DistributedDataParallel


def pairs() -> Iterator[tuple[str, str]]:
    """Yield (case, auto class): for each family every head of one, and the main head of the cases that show a route.

    That every parameter of every case gets a gradient is in `tests/models/shared_contract.py`.
    """
    complete = one_each()
    for name, case in BY_NAME.items():
        if name in complete or case.shows_a_route:
            yield from ((name, head) for head in (case.heads if name in complete else [case.main_head]))


def train_together(case: Any, auto_class: str, is_checkpointed: bool) -> dict[str, torch.Tensor]:
    """Return the weights that the processes reach with a part of the examples each.

    A parameter without a gradient is an error in the second step, since nothing looks for it.
    """
    model = build(case, auto_class)
    if is_checkpointed:
        checkpoint_activations(model)
    wrapped = DistributedDataParallel(model, find_unused_parameters=False)
    rank, processes = distributed.get_rank(), distributed.get_world_size()
    train(wrapped, lambda step: [batch_of(case, auto_class, step, rank, processes)])
    return weights_of(model)


def train_in_ways(name: str, auto_class: str, reached: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return how far from `reached` DDP ends; for some heads also with checkpointed activations."""
    case = BY_NAME[name]
    is_checkpointed_too = auto_class == case.main_head and name in one_each()
    report: dict[str, Any] = {}
    for way, is_checkpointed in {"ddp": False, **({"checkpointed": True} if is_checkpointed_too else {})}.items():
        try:
            together = train_together(case, auto_class, is_checkpointed)
            report[way] = largest_difference(reached or together, together)
        except RuntimeError as error:
            report[way] = str(error)
    return report


def main(folder: Path, is_thorough: bool) -> None:
    torch.set_num_threads(1)
    rank, processes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    chosen = [(name, head) for name, head in pairs() if is_thorough or head == BY_NAME[name].main_head]
    # before the processes know each other: models that one trains alone would count as different from the others'
    alone = {(name, head): train_alone(BY_NAME[name], head, processes) for name, head in chosen if rank == 0}
    distributed.init_process_group("gloo")
    report = {}
    for name, head in chosen:
        one = alone.get((name, head), Alone({}, 0.0, 0.0))
        found = train_in_ways(name, head, one.weights)
        report[f"{name}-{head}"] = {"moved": one.moved, "apart": one.apart, **found}
    if rank == 0:
        (folder / "report.json").write_text(json.dumps(report))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), "thorough" in sys.argv[2:])
