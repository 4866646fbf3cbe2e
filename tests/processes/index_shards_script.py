"""Train models with indexers whose weights are in shards (FSDP), in both stages.

    torchrun --nproc_per_node 2 index_shards_script.py FOLDER [thorough]

Writes FOLDER/{rank}.json: for each case by how much the gradients of two steps differ from those of one process, at
most, as a share of their norm, and by how much those of one process in the same precision do; or what was raised.
"""

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers as tr
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from torch import Tensor, distributed
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard

import hf_efficient_attn as hea
from hf_efficient_attn.integration.indexer import STAGES, indexers_of

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
SIZES: dict[str, Any] = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
SIZES |= {"num_attention_heads": 4, "initializer_range": 0.2}
ROPE: dict[str, Any] = {**SIZES, "is_causal": True, "position_embedding_type": "rope"}
MAKE: dict[str, Callable[[], Any]] = {
    "llama": lambda: tr.LlamaForCausalLM(tr.LlamaConfig(**SIZES)),
    "sparse": lambda: hea.SparseTransformerForCausalLM(hea.SparseTransformerConfig(**ROPE)),
    "sas": lambda: hea.SimplifiedTransformerForCausalLM(
        hea.SimplifiedTransformerConfig(**ROPE, block="sas", query_init_std=0.2)
    ),
}
NARROW = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
IDS = torch.randint(2, 50, (4, 20), generator=torch.Generator().manual_seed(1))


def make(name: str, stage: str, top_k: int = 6) -> Any:
    torch.manual_seed(0)
    return hea.index_stage(hea.index(MAKE[name](), top_k=top_k, num_heads=3), stage).train()


def checkpointed(model: Any) -> Any:
    """Return the model, whose activations transformers computes again."""
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})
    return model


def in_shards(model: Any, whole_layers: bool = False, **options: Any) -> Any:
    """Return the model in shards of its indexers and layers; `whole_layers`: of layers with their indexers."""
    units = [*([] if whole_layers else indexers_of(model)), *model.model.layers, model]
    for unit in units:
        fully_shard(unit, **options)
    return model


def by_accelerate(model: Any, **options: Any) -> Any:
    """Return the model in shards by accelerate, which offers this on GPUs only: here it is told so."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap", **options)
    told = {"distributed_type": DistributedType.FSDP, "fsdp_plugin": plugin}
    accelerator = Accelerator(cpu=True)
    # as Trainer does: a layer that is computed again would append to the cache again
    model.config.use_cache = False
    with patch.dict(AcceleratorState._shared_state, told):
        return accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))[0]


def first_version(model: Any) -> Any:
    """Return the model in shards of layers with their indexers by the first version of FSDP."""
    for place, layer in enumerate(model.model.layers):
        model.model.layers[place] = FullyShardedDataParallel(layer, use_orig_params=True, device_id=torch.device("cpu"))
    return model


def gradients(model: Any, ids: Tensor) -> dict[str, Tensor]:
    """Return the gradients of a step but for zeros, whole, by the names of their parameters without wrappers."""
    model.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    found = {name.replace("_checkpoint_wrapped_module.", ""): each.grad for name, each in model.named_parameters()}
    whole = {name: getattr(each, "full_tensor", lambda each=each: each)() for name, each in found.items()}
    return {name: each for name, each in whole.items() if each is not None and each.any()}


def furthest(model: Any, alone: Any, rank: int = RANK, world: int = WORLD) -> float:
    """Return by how much the gradients of two steps differ at most; infinity if others have one."""
    worst = 0.0
    for step in range(2):
        ids = IDS.roll(step, 1)
        found, expected = gradients(model, ids[rank::world]), gradients(alone, ids)
        if found.keys() != expected.keys():
            return float("inf")
        worst = max(worst, *(float((found[name] - each).norm() / each.norm()) for name, each in expected.items()))
    return worst


PLAIN: dict[str, Callable[[Any], Any]] = {
    "layers": in_shards,
    "layers, kept whole": partial(in_shards, reshard_after_forward=False),
    "layers, checkpointed": lambda model: in_shards(checkpointed(model)),
    "accelerate, checkpointed": partial(by_accelerate, activation_checkpointing=True),
}
# every key is read, so that no choice differs by rounding
ROUNDED: dict[str, Callable[[Any], Any]] = {
    "bfloat16, checkpointed": lambda model: in_shards(checkpointed(model), mp_policy=NARROW),
}
REFUSED: dict[str, Callable[[Any], Any]] = {
    "indexers in layers": partial(in_shards, whole_layers=True),
    "layers by name": partial(by_accelerate, transformer_cls_names_to_wrap=["LlamaDecoderLayer"]),
    "first version": first_version,
}
WAYS = {"llama": (*PLAIN, *ROUNDED)}
WAYS |= {"sparse": ("accelerate, checkpointed", "bfloat16, checkpointed"), "sas": ("accelerate, checkpointed",)}
NAMES = [(name, stage, way) for name in MAKE for stage in STAGES[1:] for way in WAYS[name]]
# the stages take turns unless it is thorough, but in the first way
OFTEN = [each for each in NAMES if (STAGES.index(each[1]) + WAYS[each[0]].index(each[2])) % 2 or each[2] == "layers"]


def refusal(model: Any) -> str:
    """Return what is raised in training."""
    try:
        model(input_ids=IDS, labels=IDS)
    except hea.UnsupportedBackendError as error:
        return str(error)
    return ""


def main(folder: Path, is_thorough: bool) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    report: dict[str, Any] = {}
    for name, stage, way in NAMES if is_thorough else OFTEN:
        alone = partial(make, name, stage, 20 if way in ROUNDED else 6)
        found = furthest({**PLAIN, **ROUNDED}[way](alone()), alone())
        rounding = furthest(alone().bfloat16(), alone(), 0, 1) if way in ROUNDED else 1e-5
        report[f"{name}, {stage}, {way}"] = (found, rounding)
    for way, wrap in REFUSED.items():
        report[way] = refusal(wrap(make("llama", "sparse")))
    (folder / f"{RANK}.json").write_text(json.dumps(report))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), "thorough" in sys.argv)
