"""The pieces of ETC's attention in which all pairs are computed: with masks and labels that say what the text is.

Long texts are computed by tiles of queries. A backward pass computes the scores of a tile again, so that no more than
one tile's lie in memory: what is kept grows with the tokens, not with the pairs.

Shapes: B rows, H heads, Q queries, K keys, D head size.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout as drop
from torch.utils.checkpoint import checkpoint

# scores of a tile: 4 MiB of float32, about what a core's caches hold
TILE_SCORES = 1 << 20


def attend_pairs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    added: Callable[[slice], Tensor | None],
    allowed: Tensor,
    scale: float,
    dropout: float,
    need_weights: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return outputs [B, H, Q, D], log-sum-exps [B, H, Q] and, if they are needed, weights [B, H, Q, K].

    Those of queries without keys are 0, -inf and 0. Softmax and log-sum-exp are computed in float32 or float64.

    Args:
        query, key, value: [B, H, Q, D] and [B, H, K, D].
        added: returns what is added to the scores of some queries, [B, H, q, K]; None: nothing.
        allowed: True = the query reads the key; [B or 1, 1, Q, K].
        dropout: of the weights.
    """

    def attend(query: Tensor, part: slice) -> tuple[Tensor, ...]:
        return _attend(query, key, value, added(part), allowed[:, :, part], scale, dropout, need_weights)

    tiles = _tiles(query, key)
    if len(tiles) == 1:
        out, lse, *weights = attend(query, slice(None))
    else:
        # random numbers are drawn again as they were only if there are any
        again: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": dropout > 0}
        parts = [checkpoint(attend, query[:, :, part], part, **again) for part in tiles]
        out, lse, *weights = (torch.cat(each, 2) for each in zip(*parts, strict=True))
    return out, lse, weights[0] if weights else None


def _tiles(query: Tensor, key: Tensor) -> list[slice]:
    """Return the tiles of queries: one if there are few pairs, or if a compiler joins what is done with them."""
    if torch.compiler.is_compiling():
        return [slice(None)]
    batch, heads, num_queries, _ = query.shape
    rows = max(1, TILE_SCORES // max(1, batch * heads * key.shape[2]))
    return [slice(first, first + rows) for first in range(0, num_queries, rows)] or [slice(None)]


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    added: Tensor | None,
    allowed: Tensor,
    scale: float,
    dropout: float,
    need_weights: bool,
) -> tuple[Tensor, ...]:
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = (query @ key.mT).to(wide) * scale
    scores = scores if added is None else scores + added
    has_keys = allowed.any(-1, keepdim=True)
    # the softmax of nothing but -inf would be NaN, and so would its gradient
    scores = scores.masked_fill(~allowed & has_keys, -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.unsqueeze(-1)).exp().masked_fill(~has_keys, 0.0)
    lse = torch.where(has_keys[..., 0], lse, -torch.inf)
    out = drop(weights, dropout).to(value.dtype) @ value
    return (out, lse, weights) if need_weights else (out, lse)
