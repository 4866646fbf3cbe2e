"""Processes that train one model must agree on what its heads read: compared once, at the first step of training.

Each process writes what its config says into the store that brought the processes together, and reads what the
neighbouring ranks have written so far. Nobody waits, so that a process that trains nothing, or something else, stops
none: of two neighbours that differ, the later one raises.
"""

import json
from typing import Any

import torch
from torch import distributed, nn

from hf_efficient_attn.attention.untraced import run_untraced
from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.messages import shown

# what decides who reads whom, in the configs of all families
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
    "block",
)
# what tells models apart that processes may train side by side
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
# where a module keeps the pattern that was compared
COMPARED = "_compared_pattern"


def compare_processes(module: nn.Module) -> None:
    """Compare the module's config with that of the neighbouring ranks: once in training, and for every new pattern.

    Raises:
        ConfigurationError: another process of the default process group trains such a model with another pattern.
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
    rank, model = distributed.get_rank(), f"{type(config).__name__}{[getattr(config, name, None) for name in SIZES]}"
    # models of equal class and sizes are compared in the order in which they are trained
    number = store.add(f"hf_efficient_attn/{model}/trained by {rank}", 1)
    own = {name: getattr(config, name, None) for name in FIELDS}
    store.set(f"hf_efficient_attn/{model}/{number}/{rank}", json.dumps(own, sort_keys=True, default=str))
    for other in {(rank - 1) % num_processes, (rank + 1) % num_processes}:
        key = f"hf_efficient_attn/{model}/{number}/{other}"
        if store.check([key]):
            _refuse_difference(json.loads(store.get(key)), json.loads(json.dumps(own, default=str)), other, rank)
    module.__dict__[COMPARED] = pattern


def _refuse_difference(theirs: dict[str, Any], own: dict[str, Any], other: int, rank: int) -> None:
    for name in FIELDS:
        if theirs.get(name) != own[name]:
            raise ConfigurationError(
                f"The processes train different models: {name} is {shown(theirs.get(name))} on rank {other} and "
                f"{shown(own[name])} on rank {rank}. Build the model in every process from the same config, or read "
                "the same checkpoint."
            )
