"""Let two groups of two processes share the texts of a batch each, under DistributedDataParallel and under FSDP2.

    torchrun --nproc_per_node 4 sharded_meshes_script.py FOLDER

The first process writes FOLDER/{way}.pt: the gradients of all parameters, and the mean of the groups' losses.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import hf_efficient_attn as hea
from hf_efficient_attn.patterns import Band, GlobalTokens

GROUPS, TOKENS = 2, 21
SIZES = {"vocab_size": 64, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 6}


def build() -> Any:
    """Return the model, with the same weights in every process."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2)
    model = hea.sparsify(transformers.LlamaForCausalLM(config), Band(5, 0) | GlobalTokens([0]))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def batches() -> list[dict[str, Tensor]]:
    """Return the batch of every group of processes; all have as many labels."""
    generator = torch.Generator().manual_seed(1)
    found = [torch.randint(3, 64, (2, TOKENS), generator=generator) for _ in range(GROUPS)]
    return [{"input_ids": ids, "labels": ids} for ids in found]


def in_ddp(model: Any, mesh: DeviceMesh) -> Any:
    """All processes hold all weights."""
    return DistributedDataParallel(model)


def in_fsdp(model: Any, mesh: DeviceMesh) -> Any:
    """All four processes divide the weights."""
    return divided(model, mesh._flatten())


def in_hsdp(model: Any, mesh: DeviceMesh) -> Any:
    """The two processes that share texts divide the weights, of which each group has a copy."""
    return divided(model, mesh)


def divided(model: Any, mesh: DeviceMesh) -> Any:
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


WAYS = {"ddp": in_ddp, "fsdp": in_fsdp, "hsdp": in_hsdp}


def main(folder: Path) -> None:
    """Compute the gradients of one step in every way."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (GROUPS, distributed.get_world_size() // GROUPS), mesh_dim_names=("dp", "sp"))
    for way, wrap in WAYS.items():
        model = wrap(hea.shard_sequence(build(), mesh["sp"]), mesh)
        loss = model(**batches()[mesh["dp"].get_local_rank()], use_cache=False).loss
        loss.backward()
        found = {"loss": loss.detach()}
        distributed.all_reduce(found["loss"])
        found["loss"] /= distributed.get_world_size()
        for name, parameter in model.named_parameters():
            gradient: Any = parameter.grad
            whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
            found[name.removeprefix("module.")] = whole.detach().clone()
        if distributed.get_rank() == 0:
            torch.save(found, folder / f"{way}.pt")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
