"""Processes that train one model must agree on what its heads read; they compare this at the first step of training.

The first process that trains a model writes its config's fields into the store of the process group; every other
process compares itself with the first, and raises if it differs. No process waits, so that one that trains nothing, or
something else, blocks none. What DDP trains is compared with what DDP trains elsewhere, so that a process may train
another model alone before, such as a reference.
"""

import hashlib
import json
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.layout.tracing import run_untraced
from hf_efficient_attn.messages import shown

# the fields of the configs of all families that decide who reads whom
FIELDS = (
    "attention_pattern",
    "global_tokens",
    "global_projections",
    "full_attention_up_to",
    "random_blocks_in_eval",
    "span",
    "span_limit",
    "span_ramp",
    "include_self",
    "frozen_spans",
    "num_routing_heads",
    "layers_with_routing",
    "num_clusters",
    "cluster_tokens",
    "membership",
    "share_qk",
    "block",
    "attn_layers",
    "lsh_attn_chunk_length",
    "local_attn_chunk_length",
    "num_buckets",
    "num_hashes",
    "chunk_by_bucket",
    "hash_seed",
    "ring",
    "relay_init",
    "separate_sentences",
)
# the fields that distinguish models that processes may train side by side
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
# the attribute in which a module keeps the pattern that was compared
COMPARED = "_compared_pattern"


def compare_processes(module: nn.Module) -> None:
    """Compare the module's config with that of the other processes, once in training and for every new pattern.

    Raises:
        ConfigurationError: another process of the default process group trains the model with another pattern.
    """
    if not module.training or not torch.is_grad_enabled():
        return
    if distributed.is_available() and distributed.is_initialized():
        run_untraced(_compare, module)


def _compare(module: nn.Module) -> None:
    config: Any = module.config
    pattern = getattr(config, FIELDS[0], None)
    num_processes, backend = distributed.get_world_size(), distributed.get_backend()
    if module.__dict__.get(COMPARED, module) is pattern or num_processes == 1 or backend == "fake":
        return
    store = distributed.distributed_c10d._get_default_store()
    rank, sizes = distributed.get_rank(), [getattr(config, name, None) for name in SIZES]
    # the only wrapper that the modules within can see
    by = "DDP" if DistributedDataParallel._get_active_ddp_module() is not None else "itself"
    model = f"{type(config).__name__}{sizes} by {by}"
    # models of equal class and sizes are compared in the order in which they are trained
    number = store.add(f"hf_efficient_attn/{model}/trained by {rank}", 1)
    own = {"rank": rank, **{name: _described(getattr(config, name, None)) for name in FIELDS}}
    first = store.compare_set(f"hf_efficient_attn/{model}/{number}", "", json.dumps(own))
    _refuse_difference(json.loads(first), own)
    module.__dict__[COMPARED] = pattern


def _described(value: Any) -> list[str]:
    """Return a digest of a value, and how a message shows it; stores take no long texts."""
    text = json.dumps(value, sort_keys=True, default=str)
    return [hashlib.sha256(text.encode()).hexdigest(), shown(value)]


def _refuse_difference(first: dict[str, Any], own: dict[str, Any]) -> None:
    for name in FIELDS:
        if first[name] != own[name]:
            raise ConfigurationError(
                f"The processes train different models: {name} is {first[name][1]} on rank {first['rank']} and "
                f"{own[name][1]} on rank {own['rank']}. Build the model in every process from the same config, or "
                "read the same checkpoint."
            )
