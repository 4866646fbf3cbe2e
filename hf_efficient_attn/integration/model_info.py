"""Facts about a model before it runs: whether it can follow a pattern, and which of its heads a process computes.

A pattern that differs from head to head is defined for all heads of the model, so that each process computes in its
heads exactly what a single process would.
"""

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_efficient_attn.errors import ConfigurationError, UnsupportedBackendError
from hf_efficient_attn.integration.layer_patterns import DECODER, NAME, checked_spec, part_of
from hf_efficient_attn.integration.names import has_rows
from hf_efficient_attn.layout.tracing import run_untraced
from hf_efficient_attn.layout.transfer import on_host
from hf_efficient_attn.messages import shown, warn_once
from hf_efficient_attn.patterns.pattern import Pattern

# Checks that a model can follow a pattern, before any trial.


# sparse models of transformers that `convert` supports
CONVERTED = ("big_bird", "bigbird_pegasus", "led", "longformer")


def check_class(model_class: Any, config: PreTrainedConfig) -> None:
    """Raise UnsupportedBackendError for a class that does not use the attention interface of transformers."""
    if not model_class._can_set_attn_implementation():
        raise UnsupportedBackendError(
            f"{model_class.__name__} does not use the attention interface of transformers, so its attention cannot be "
            f"replaced. {other_way(config)}"
        )


def other_way(config: PreTrainedConfig) -> str:
    """Return the advice for a model that cannot be sparsified, as a sentence."""
    if config.model_type in CONVERTED:
        return (
            "Its own attention is sparse: hf_efficient_attn.convert(model) makes a model that follows patterns from it."
        )
    return "model_cards/engine.md lists models that can follow a pattern."


def check_home(config: PreTrainedConfig) -> None:
    """Raise ConfigurationError if the config is that of a composite model, whose layers would ignore the pattern."""
    text_config = config.get_text_config()
    if text_config is not config:
        raise ConfigurationError(
            f"attention_pattern is in {type(config).__name__}, but layers look for it in "
            f"{type(text_config).__name__}, the config of their part of the model, and would ignore it. Delete it, "
            "and call sparsify(model, pattern)."
        )


def checked_pattern(pattern: Any, config: PreTrainedConfig) -> Any:
    """Return a pattern in JSON types, after checking that it fits a model with this config.

    Raises:
        ConfigurationError: the pattern does not fit, or its form is unknown.
    """
    text_config = config.get_text_config()
    if getattr(text_config, "span", None) is not None:
        raise ConfigurationError(
            f"This {type(text_config).__name__} has span={shown(text_config.span)}: its heads attend as far as their "
            "spans, and would ignore a pattern. Sparsify a model without spans."
        )
    if text_config is not config and config.is_encoder_decoder:
        raise ConfigurationError(
            f"{type(config).__name__} combines two models, each with its own config. Call sparsify on model.encoder "
            "or model.decoder."
        )
    return checked_spec(pattern, text_config)


# Attention functions that another library has replaced, such as DeepSpeed's sequence parallelism (Ulysses).
#
# DeepSpeed's function gathers the whole sequence for some of the heads, and calls the function that it has replaced
# without a mask, but with the positions of all tokens.


# the module in which DeepSpeed stores the groups of processes that share a sequence; imported only if it is used
DEEPSPEED_GROUPS = "deepspeed.runtime.sequence_parallel.parallel_state_sp"


def is_overridden(implementation: str) -> bool:
    """Return whether models call a function other than the one that this package registered under this name."""
    registered = AttentionInterface._global_mapping.get(implementation)
    return ALL_ATTENTION_FUNCTIONS.get(implementation) is not registered


def shard_of_heads(implementation: str) -> tuple[int, int] | None:
    """Return (rank of this process, number of processes) if DeepSpeed divides the heads among processes, else None.

    All processes get the same number of heads, in the order of their ranks.
    """
    groups: Any = sys.modules.get(DEEPSPEED_GROUPS)
    if not is_overridden(implementation) or getattr(groups, "_SEQUENCE_PARALLEL_GROUP", None) is None:
        return None
    return groups.get_sequence_parallel_rank(), groups.get_sequence_parallel_world_size()


def warn_of_parts(position_ids: Tensor, implementation: str) -> None:
    """Warn if positions, [batch, tokens], restart at 0 in the part of each process."""
    shard = shard_of_heads(implementation)
    if shard is None or position_ids.shape[1] % shard[1]:
        return
    parts = position_ids.unflatten(1, (shard[1], -1))
    if bool((parts == torch.arange(parts.shape[2], device=parts.device)).all()):
        warn_once(
            "With the sequence parallelism of DeepSpeed (Ulysses), position_ids restart exactly where the part of "
            "each process begins, as they do if none are passed: every part is treated as a separate document. If "
            "texts continue from part to part, pass each process the position_ids of its part, as "
            "UlyssesSPDataLoaderAdapter does."
        )


def refuse_lost_padding(table: Tensor, implementation: str) -> None:
    """Raise UnsupportedBackendError for a token table with padding if the layers would not get the table."""
    if torch.compiler.is_compiling() or not has_rows(table) or not is_overridden(implementation):
        return
    if bool((on_host(table)[:, 0, 0] == 0).any()):
        raise UnsupportedBackendError(
            f"Another library has replaced the attention function {shown(implementation)} (as DeepSpeed Ulysses does) "
            "and passes it no masks, so tokens would attend to padding. Pass texts without padding and without "
            "attention_mask, packed with position_ids that restart with every document."
        )


def refuse_overridden(implementation: str | None, model: str) -> None:
    """Raise UnsupportedBackendError if another library has replaced the attention of a model that would bypass it.

    model: the name of the model, for the message.
    """
    if torch.compiler.is_compiling() or implementation is None or not is_overridden(implementation):
        return
    raise UnsupportedBackendError(
        f"Another library has replaced the attention function {shown(implementation)}, as the sequence parallelism of "
        f"DeepSpeed (Ulysses) does, but {model} needs more from other tokens than that function exchanges: every "
        "process would use only its own part of the text. Use hea.shard_sequence, if it takes this model, data "
        "parallelism (DDP, FSDP), or a sparsified model of transformers."
    )


# the attribute in which a module stores the result of `keep_heads`
KNOWN = "_attention_heads"
# the attributes of modules and configs for the number of heads of a layer; the first that exists counts
HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
DECODER_COUNT = "decoder_attention_heads"

# (index of the first head, number of heads of the model; None if this process computes all heads)
HeadRange = tuple[int, int | None]


def head_range(module: nn.Module, pattern: Pattern, num_heads: int) -> HeadRange:
    """Return which heads of the model the `num_heads` query heads of a call are; (0, None) if all heads are alike.

    Raises:
        UnsupportedBackendError: the module has more heads, and it is unknown which of them the call has.
    """
    if not (pattern.is_random or pattern.num_head_patterns > 1):
        return 0, None
    run_untraced(keep_heads, module)
    declared, shards, sequence_parallel = getattr(module, KNOWN)
    if declared is None and not shards and sequence_parallel is None:
        return 0, None
    if declared is not None and num_heads >= declared:
        return 0, None
    # sequence parallelism divides the heads of one process's projections among its processes
    rank_within, num_within = sequence_parallel or (0, 1)
    for rank, num_shards in ((0, 1), *shards):
        if declared == num_shards * num_within * num_heads:
            return (rank * num_within + rank_within) * num_heads, declared
    raise UnsupportedBackendError(
        f"{type(module).__name__} computes {num_heads} of {declared or 'an unknown number of'} heads in this process, "
        f"and its parameters do not show which, but the pattern ({pattern.kind}) differs from head to head. Use the "
        "tensor parallelism of transformers or DeepSpeed's Ulysses, with a number of processes that divides the "
        "heads, or a pattern that is the same for all heads."
    )


def keep_heads(module: nn.Module) -> None:
    """Store in a module (declared number of heads, shards of the projections, shard of sequence parallelism or None).

    A shard is (rank, number of shards).
    """
    module.__dict__[KNOWN] = (declared_heads(module), tuple(head_shards(module)), shard_of_heads(NAME))


def declared_heads(module: nn.Module) -> int | None:
    """Return the total number of heads of a layer; None: unknown."""
    config: Any = getattr(module, "config", None)
    names = ((DECODER_COUNT,) if part_of(module) == DECODER else ()) + HEAD_COUNTS
    counts = (getattr(place, name, None) for place in (module, config) for name in names)
    return next((count for count in counts if isinstance(count, int)), None)


def head_shards(module: nn.Module) -> list[tuple[int, int]]:
    """Return (rank of this process, number of shards) of every way in which the module's projections are sharded."""
    found: list[tuple[int, int]] = []
    for mesh, dimension in head_meshes(module):
        shard = (mesh.get_local_rank(dimension), mesh.size(dimension))
        found += [] if shard in found else [shard]
    return found


def head_meshes(module: nn.Module) -> Iterator[tuple[Any, int]]:
    """Yield the device mesh and the mesh dimension by which each of the module's projections is sharded."""
    for layer in module.children():
        parameter: Any
        for parameter in layer.parameters(recurse=False):
            for dimension, placement in enumerate(getattr(parameter, "placements", ())):
                if placement.is_shard() and placement.dim in (0, -parameter.ndim):
                    yield parameter.device_mesh, dimension


@torch.compiler.disable
def head_group(module: nn.Module, num_heads: int) -> Any:
    """Return the processes that together compute the heads of a module; None: this one computes all.

    Raises:
        UnsupportedBackendError: this process computes only `num_heads` of the heads, and it is unknown which processes
            compute the others.
    """
    declared, meshes = declared_heads(module), list(head_meshes(module))
    if (declared is None and not meshes) or (declared is not None and num_heads >= declared):
        return None
    for mesh, dimension in meshes:
        if declared == mesh.size(dimension) * num_heads:
            return mesh.get_group(dimension)
    raise UnsupportedBackendError(
        f"{type(module).__name__} computes {num_heads} of {declared or 'an unknown number of'} heads in this process, "
        "and its parameters do not show which processes compute the others, but its indexer (hea.index) learns from "
        "all heads. Use the tensor parallelism of transformers, with a number of processes that divides the heads."
    )
