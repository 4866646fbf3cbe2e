"""Position tables of another length, or with another number of rows before that of position 0."""

import os
from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.errors import ConfigurationError

TABLE = "embeddings.positions.table.weight"
# config fields: lengths of the encoder, or only stack, and of the decoder
SOURCE, TARGET = "max_position_embeddings", "max_target_position_embeddings"
GIBIBYTE = 2**30
# of a weight in float32, and of an index
WEIGHT_BYTES, INDEX_BYTES = 4, 8


def cyclic_table(table: Tensor, offset: int, num_positions: int) -> Tensor:
    """Return a table of `offset` + `num_positions` rows: the first `offset` stay, the others come round and round.

    Source: Beltagy et al. (arXiv:2004.05150), section 5.

    >>> cyclic_table(torch.arange(5.0).view(5, 1), 2, 7).flatten().tolist()
    [0.0, 1.0, 2.0, 3.0, 4.0, 2.0, 3.0, 4.0, 2.0]
    """
    front, rows = table[:offset], table[offset:]
    return torch.cat((front, rows[torch.arange(num_positions, device=table.device) % len(rows)]))


def check_lengths(old: Any, new: Any) -> None:
    """Raise ConfigurationError where the config `new` has fewer positions than `old`, or more than weights can have.

    Linformers project from as many places as their longest text has, or by strides that divide it.
    """
    longest, wanted = getattr(old, SOURCE, 0), getattr(new, SOURCE, 0)
    if getattr(old, "has_one_length", False) and wanted != longest:
        raise ConfigurationError(
            f"{SOURCE}={wanted}: the projections of this Linformer are made for texts of up to {longest} tokens, and "
            "other lengths would change what it computes. Leave it out, or train a model of that length."
        )
    if new.position_embedding_type == "none":
        return
    for name in (SOURCE, TARGET):
        size, wanted = getattr(old, name, 0), getattr(new, name, 0)
        if wanted < size:
            raise ConfigurationError(f"{name}={wanted} would cut the {size} positions of the source: at least {size}.")


def check_memory(config: Any) -> None:
    """Raise ConfigurationError where a table of learned positions would not fit into the memory of this machine."""
    memory = memory_bytes()
    if config.position_embedding_type != "learned" or memory is None:
        return
    for name in (SOURCE, TARGET):
        needed = getattr(config, name, 0) * (WEIGHT_BYTES * config.hidden_size + INDEX_BYTES)
        if needed > memory:
            raise ConfigurationError(
                f"{name}={getattr(config, name)} takes a table of learned positions of {needed / GIBIBYTE:,.0f} GiB, "
                f"and this machine has {memory / GIBIBYTE:,.0f} GiB of memory. Give the length of the longest input."
            )


def memory_bytes() -> int | None:
    """Return how much memory this machine has; None: the system does not say."""
    names = getattr(os, "sysconf_names", {})
    if not {"SC_PHYS_PAGES", "SC_PAGE_SIZE"} <= set(names):
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def lengthen(weights: dict[str, Tensor], new: Any) -> dict[str, Tensor]:
    """Return the weights, in our names, with position tables as long as the config `new` says."""

    def lengthened(name: str, table: Tensor) -> Tensor:
        size = getattr(new, TARGET if "decoder." in name else SOURCE)
        return table if len(table) == new.position_offset + size else cyclic_table(table, new.position_offset, size)

    return {name: lengthened(name, each) if name.endswith(TABLE) else each for name, each in weights.items()}


def shift(weights: dict[str, Tensor], old_offset: int, new_offset: int) -> dict[str, Tensor]:
    """Return the weights with `new_offset` rows, which no token has, before that of position 0, in every table."""

    def shifted(table: Tensor) -> Tensor:
        return torch.cat((table.new_zeros(new_offset, table.shape[1]), table[old_offset:]))

    return {
        name: shifted(tensor) if name.endswith(TABLE) and old_offset != new_offset else tensor
        for name, tensor in weights.items()
    }
