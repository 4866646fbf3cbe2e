"""Grids as dense matrices, read once more from their documentation, for `tests/fuzz_formula.py`."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# a pattern, a number of tokens, and which head of which layer reads
Read = Callable[[Any, int, Any], Tensor]


def read_grid(pattern: Any, num_tokens: int, head: Any, readable: Read) -> Tensor:
    """Every axis lets the coordinate of the query read that of the key; prefix tokens are global."""
    positions, sizes = torch.arange(num_tokens) - pattern.prefix_tokens, list(pattern.shape)
    row_tokens = math.prod(sizes[1:])
    sizes[0] = -(-(num_tokens - pattern.prefix_tokens) // row_tokens) if sizes[0] is None else sizes[0]
    is_inside = (positions >= 0) & (positions < sizes[0] * row_tokens)
    reads = is_inside[:, None] & is_inside[None]
    for number, (axis, size) in enumerate(zip(pattern.axes, sizes, strict=True)):
        at = (positions.clamp(0, sizes[0] * row_tokens - 1) // math.prod(sizes[number + 1 :])) % size
        reads &= (read_shifted if pattern.borders == "shifted" else readable)(axis, size, head)[at[:, None], at[None]]
    reads |= (positions < 0)[:, None] | (positions < 0)[None]
    return reads.tril() if pattern.is_causal else reads


def read_shifted(axis: Any, num_tokens: int, head: Any) -> Tensor:
    """As many keys for every query: the window slides inwards along the tokens of the query's residue class."""
    if axis.kind == "per_head":
        return read_shifted(axis.patterns[head.head * len(axis.patterns) // head.num_heads], num_tokens, head)
    reads = torch.zeros(num_tokens, num_tokens, dtype=torch.bool)
    for query in range(num_tokens):
        own = list(range(query % axis.step, num_tokens, axis.step))
        if axis.left is not None:
            num_read = axis.left // axis.step + axis.right // axis.step + 1
            first = max(0, min(own.index(query) - axis.left // axis.step, len(own) - num_read))
            own = own[first : first + num_read]
        reads[query, own] = True
    return reads
