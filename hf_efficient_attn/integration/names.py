"""The forms of token tables, and the config field of indexers.

The form of a token table (`masks.py`) is what is known about it when its values cannot be read.

Compiled and exported models know shapes, not values. The second dimension of a table therefore distinguishes causal
masks from bidirectional ones; the rows are expanded to its size without a copy. The sizes are unusual numbers of heads,
so that modules that add masks to scores themselves fail.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

TABLE_DTYPE = torch.int32
CAUSAL, BIDIRECTIONAL = "causal", "bidirectional"
KINDS = {11: CAUSAL, 13: BIDIRECTIONAL}
SIZES = {kind: size for size, kind in KINDS.items()}


def is_table(mask: Tensor) -> bool:
    """Return whether a mask is a token table."""
    return mask.dtype == TABLE_DTYPE


def has_rows(table: Tensor) -> bool:
    """Return whether a table says anything about the keys."""
    return table.shape[2] > 0


def table_kind(table: Tensor) -> str | None:
    """Return CAUSAL or BIDIRECTIONAL; None: the table does not say."""
    return KINDS.get(table.shape[1])


def with_kind(table: Tensor, is_causal: bool) -> Tensor:
    """Return a table [batch, 1, rows, keys] expanded to the size of its kind."""
    return table.expand(-1, SIZES[CAUSAL if is_causal else BIDIRECTIONAL], -1, -1)


def is_causal_request(arguments: Mapping[str, Any]) -> bool:
    """Return whether transformers requests a causal mask, by the arguments of the mask function.

    Only requests for bidirectional masks have the argument `allow_is_bidirectional_skip`.
    """
    return arguments.get("allow_is_bidirectional_skip") is None


# the config field of a model whose layers have indexers: {"top_k": …, "num_heads": …, "head_dim": …, "stage": …}
INDEXER = "attention_indexer"


def has_indexer(config: Any) -> bool:
    """Return whether the layers of a model have indexers."""
    return getattr(config, INDEXER, None) is not None
