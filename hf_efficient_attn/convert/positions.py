"""Position tables of another length, or with another number of rows before that of position 0."""

import torch
from torch import Tensor

from hf_efficient_attn.errors import ConfigurationError

TABLE = "embeddings.positions.table.weight"


def cyclic_table(table: Tensor, offset: int, num_positions: int) -> Tensor:
    """Return a table of `offset` + `num_positions` rows: the first `offset` stay, the others come round and round.

    Source: Beltagy et al. (arXiv:2004.05150), section 5.

    >>> cyclic_table(torch.arange(5.0).view(5, 1), 2, 7).flatten().tolist()
    [0.0, 1.0, 2.0, 3.0, 4.0, 2.0, 3.0, 4.0, 2.0]
    """
    front, rows = table[:offset], table[offset:]
    return torch.cat((front, rows[torch.arange(num_positions, device=table.device) % len(rows)]))


def lengthen(weights: dict[str, Tensor], old: int, new: int, offset: int) -> dict[str, Tensor]:
    """Return the weights, in our names, with a position table for `new` positions; of an encoder-decoder the encoder's.

    Raises:
        ConfigurationError: fewer positions than there are.
    """
    if new < old:
        raise ConfigurationError(
            f"max_position_embeddings={new} would cut the {old} positions of the source. Ask for at least {old}."
        )
    return {
        name: cyclic_table(tensor, offset, new) if new > old and _is_source_table(name) else tensor
        for name, tensor in weights.items()
    }


def shift(weights: dict[str, Tensor], old_offset: int, new_offset: int) -> dict[str, Tensor]:
    """Return the weights with `new_offset` rows, which no token has, before that of position 0, in every table."""

    def shifted(table: Tensor) -> Tensor:
        return torch.cat((table.new_zeros(new_offset, table.shape[1]), table[old_offset:]))

    return {
        name: shifted(tensor) if name.endswith(TABLE) and old_offset != new_offset else tensor
        for name, tensor in weights.items()
    }


def _is_source_table(name: str) -> bool:
    return name.endswith(TABLE) and "decoder." not in name
