"""Attention weights of a few queries: what output_attentions=True returns for a long text without n² memory."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.attention.key_tokens import QueryOffset
from hf_efficient_attn.attention.notices import warn_of_weights
from hf_efficient_attn.layout.score_terms import Term
from hf_efficient_attn.layout.selected_keys import ChosenKeys

AttendLayer = Callable[..., tuple[Tensor, Tensor | None]]

# the innermost block comes last
_chosen: list[tuple[int, ...]] = []


@contextmanager
def weights_of_rows(rows: Iterable[int]) -> Iterator[None]:
    """Let models called with output_attentions=True return weights [batch, heads, rows, keys] of these queries alone.

    They are the rows of the weights of all queries. Outputs are computed as without weights, so that time and memory
    are those of a forward pass, and those of the rows. Not for generation, nor for cross-attention.
    """
    own = tuple(rows)
    _chosen.append(own)
    try:
        yield
    finally:
        _chosen.remove(own)


def chosen_rows() -> tuple[int, ...] | None:
    """Return the rows that `weights_of_rows` has set, or None outside of it."""
    return _chosen[-1] if _chosen else None


def rows_or_all(attend: AttendLayer) -> AttendLayer:
    """Return `attend_layer` that computes the weights of the chosen rows one by one, or those of all queries."""

    @wraps(attend)
    def attend_layer(query: Tensor, key: Tensor, *states: Any, need_weights: bool = False, **options: Any) -> Any:
        if not need_weights:
            return attend(query, key, *states, **options)
        rows = chosen_rows()
        if rows is None:
            warn_of_weights()
            return attend(query, key, *states, need_weights=True, **options)
        out, _ = attend(query, key, *states, **options)
        weights = [
            attend(query[:, :, row : row + 1], key, *states, need_weights=True, **_of_row(row, query, key, **options))[
                1
            ]
            for row in rows
        ]
        return out, torch.cat([each for each in weights if each is not None], 2)

    return attend_layer


def _of_row(
    row: int,
    query: Tensor,
    key: Tensor,
    query_offset: QueryOffset = None,
    matrix: Tensor | None = None,
    bias: Tensor | None = None,
    terms: Sequence[Term] = (),
    chosen: ChosenKeys | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Return the options of `attend_layer` for a single query."""
    num_queries = query.shape[2]
    position = row + (key.shape[2] - num_queries if query_offset is None else int(query_offset))

    def cut(tensor: Tensor | None) -> Any:
        # what all queries share has one row, or that of the only query
        return tensor if tensor is None or tensor.shape[2] < num_queries else tensor[:, :, row : row + 1]

    return {
        "chosen": None if chosen is None else chosen.of_query(row, position),
        **options,
        "query_offset": position,
        "matrix": cut(matrix),
        "bias": cut(bias),
        "terms": tuple(replace(term, values=cut(term.values)) for term in terms),
    }
