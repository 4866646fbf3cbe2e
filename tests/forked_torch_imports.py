"""What scripts import of which huggingface_hub shall be imported anew, or another copy of the package.

It knows no variable of a Hub or a cache, which huggingface_hub, transformers, datasets and evaluate read as they are
imported; it takes two thirds of the time that importing all of them takes.
"""

import sys
from typing import Any

import pandas  # noqa: F401
import pyarrow  # noqa: F401
import scipy.stats  # noqa: F401
import sklearn.metrics  # noqa: F401
import torch
import torch._dynamo
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.optim  # noqa: F401
from torch.distributed import distributed_c10d

assert "huggingface_hub" not in sys.modules

# a process that has computed with several threads cannot be forked
torch.set_num_threads(1)

# where processes resume on CPUs, Trainer of transformers 5.17 asks for tensors on a place that torch does not know
torch.serialization.register_package(
    11, lambda storage: None, lambda storage, place: storage if place == "cpu:0" else None
)

destroy, kept = torch.distributed.destroy_process_group, []


def destroy_and_keep(group: Any = None) -> None:
    """Destroy groups of processes as torch does, and keep what is left of them until this process ends.

    Otherwise DistributedDataParallel, where it goes last, deletes them while it holds Python's lock: it waits for a
    thread of gloo, and that thread, where it still has a tensor to delete, for the lock.
    """
    kept.extend(distributed_c10d._world.pg_map)
    destroy(group)


torch.distributed.destroy_process_group = destroy_and_keep
