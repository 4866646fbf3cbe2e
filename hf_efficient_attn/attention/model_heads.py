"""Which heads of its model a process computes: some of them under tensor and sequence parallelism.

A pattern that differs from head to head is meant for all heads of the model, so that a process computes in its heads
exactly what a single process would.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from hf_efficient_attn.attention.layer_patterns import NAME
from hf_efficient_attn.attention.model_parts import DECODER, part_of
from hf_efficient_attn.attention.overridden import shard_of_heads
from hf_efficient_attn.errors import UnsupportedBackendError
from hf_efficient_attn.layout.tracing import run_untraced
from hf_efficient_attn.patterns.pattern import Pattern

# the attribute in which a module keeps what was found about it
KNOWN = "_attention_heads"
# the attributes of modules and configs that say how many heads a layer has; the first that exists counts
HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
DECODER_COUNT = "decoder_attention_heads"

# (index of the first head, number of heads of the model, or None if there are no others)
HeadRange = tuple[int, int | None]


def head_range(module: nn.Module, pattern: Pattern, num_heads: int) -> HeadRange:
    """Return which heads of the model the `num_heads` query heads of a call are, if the pattern depends on it.

    Raises:
        UnsupportedBackendError: the module has more heads, and it is unknown which of them these are.
    """
    if not (pattern.is_random or pattern.num_head_patterns > 1):
        return 0, None
    run_untraced(keep_heads, module)
    declared, shards, dealt = getattr(module, KNOWN)
    if declared is None and not shards and dealt is None:
        return 0, None
    if declared is not None and num_heads >= declared:
        return 0, None
    # sequence parallelism distributes among its processes what the projections of a process compute
    rank_within, num_within = dealt or (0, 1)
    for rank, num_shards in ((0, 1), *shards):
        if declared == num_shards * num_within * num_heads:
            return (rank * num_within + rank_within) * num_heads, declared
    raise UnsupportedBackendError(
        f"{type(module).__name__} computes {num_heads} of {declared or 'an unknown number of'} heads here, and which "
        f"these are its parameters do not tell, but the pattern ({pattern.kind}) differs from head to head. Use the "
        "tensor parallelism of transformers or DeepSpeed's Ulysses, with a number of processes that divides the heads, "
        "or a pattern that is the same for all heads."
    )


def keep_heads(module: nn.Module) -> None:
    """Store in a module its declared number of heads, and (rank, number of shards) of each way to shard them.

    The shards of its projections come first, then that of sequence parallelism, or None.
    """
    module.__dict__[KNOWN] = (declared_heads(module), tuple(head_shards(module)), shard_of_heads(NAME))


def declared_heads(module: nn.Module) -> int | None:
    """Return how many heads a layer of this kind has in all; None: unknown."""
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
    """Yield the mesh of processes, and its dimension, by which each of the module's projections is sharded."""
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
        UnsupportedBackendError: it computes `num_heads` of more, and the module does not tell who computes the others.
    """
    declared, meshes = declared_heads(module), list(head_meshes(module))
    if (declared is None and not meshes) or (declared is not None and num_heads >= declared):
        return None
    for mesh, dimension in meshes:
        if declared == mesh.size(dimension) * num_heads:
            return mesh.get_group(dimension)
    raise UnsupportedBackendError(
        f"{type(module).__name__} computes {num_heads} of {declared or 'an unknown number of'} heads here, and which "
        "processes compute the others its parameters do not tell, but its indexer (hea.index) learns from all heads. "
        "Use the tensor parallelism of transformers, with a number of processes that divides the heads."
    )
