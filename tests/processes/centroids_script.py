"""Train routing heads on two processes, each with half of the examples; write what every process ends with.

    torchrun --nproc_per_node 2 centroids_script.py FOLDER

Writes FOLDER/{rank}.pt, the state of the model.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from models.routing_transformer.tiny_models import build, tokens
from torch import distributed
from torch.nn.parallel import DistributedDataParallel


def train(model: Any, ids: list[torch.Tensor], **inputs: Any) -> None:
    """Take a step for each batch."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for batch in ids:
        optimizer.zero_grad()
        model(batch, labels=batch, use_cache=False, **inputs).loss.backward()
        optimizer.step()


def batches() -> list[torch.Tensor]:
    return [tokens(4, 20, seed) for seed in range(3)]


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    model = build().train()
    # buffers are the same without being sent from the first process
    wrapped = DistributedDataParallel(model, broadcast_buffers=False)
    train(wrapped, [batch[rank::2] for batch in batches()])
    torch.save(model.state_dict(), folder / f"{rank}.pt")
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
